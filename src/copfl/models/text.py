"""Sentences as arrays of token numbers, by the tokenizer of a pretrained model."""

from __future__ import annotations

import hashlib
import io
import os
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.errors import UsageError, library
from copfl.files import write_bytes
from copfl.models.pretrained import quiet, read_json, usage_errors

Arrays = dict[str, NDArray[np.int64]]
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")
NO_LIMIT = 10**6  # a tokenizer without a limit reports a larger number


def padded(lists: Sequence[Sequence[int]], pad: int = 0) -> Arrays:
    """input_ids and attention_mask [n, length] of these tokens, padded to the longest."""
    ids = np.full((len(lists), max([1, *map(len, lists)])), pad, np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(lists):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


class Tokenizer:
    """The tokenizer in a folder, for a model with that folder's config.json or with `vocabulary` words."""

    def __init__(self, folder: Path, max_length: int = 0, model: Path | None = None) -> None:
        transformers = library("transformers")
        self.folder, self.max_length = folder, max_length
        with (
            quiet(),
            usage_errors(f"the tokenizer in {folder}", "a folder with tokenizer.json, or name another one"),
        ):
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        config = read_json((model or folder) / "config.json")
        self.vocabulary = int(config.get("vocab_size", len(self.tokenizer)))
        positions = config.get("max_position_embeddings") or config.get("n_positions") or NO_LIMIT
        self.limit = int(min(self.tokenizer.model_max_length, positions))

    def __call__(self, texts: Sequence[str]) -> Arrays:
        """input_ids and attention_mask [n, length], padded to the longest; with max_length, cut to it.

        Sentences that the model does not take are an error: to cut them is the user's decision.
        """
        if self.max_length > self.limit:
            raise UsageError(f"max_length={self.max_length}, but the model takes {self.limit} tokens at most")
        limit = {"truncation": True, "max_length": self.max_length} if self.max_length else {}
        lists = self.tokenizer(list(texts), return_attention_mask=False, verbose=False, **limit)["input_ids"]
        lengths = [len(ids) for ids in lists]
        if (longest := max(lengths, default=0)) > self.limit:
            count = sum(length > self.limit for length in lengths)
            raise UsageError(
                f"{count:,} of {len(lists):,} sentences have more than the {self.limit} tokens that the "
                f"model takes, the longest {longest:,}; cut them with --set model.max_length={self.limit}"
            )
        if (largest := max((max(ids, default=0) for ids in lists), default=0)) >= self.vocabulary:
            raise UsageError(
                f"the tokenizer in {self.folder} does not fit the model: it has a token {largest:,}, but the "
                f"model has {self.vocabulary:,} words; take the tokenizer that was saved with the model"
            )
        pad = self.tokenizer.pad_token_id or 0
        return padded(lists, pad)

    def fingerprint(self, texts: Sequence[str]) -> str:
        """A hash of the sentences and of everything that determines their tokens."""
        digest = hashlib.sha256(f"1 {self.max_length} {self.limit} {self.vocabulary}".encode())
        for path in sorted({path for pattern in TOKENIZER_FILES for path in self.folder.glob(pattern)}):
            digest.update(path.name.encode() + path.read_bytes())
        for text in texts:
            digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
        return digest.hexdigest()[:24]

    def cached(self, texts: Sequence[str], cache: Path | None = None) -> Arrays:
        """`__call__`, computed once: the result is kept in the cache folder."""
        path = (cache or cache_folder()) / "tokens" / f"{self.fingerprint(texts)}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        arrays = self(texts)
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        write_bytes(path, content.getvalue(), durable=False)
        return arrays


def cache_folder() -> Path:
    """COPFL_CACHE, or copfl in the user's cache folder."""
    if given := os.environ.get("COPFL_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "copfl"


class Bytes:
    """The tokens of the model `causal_cnn`: the bytes of a text in UTF-8."""

    vocabulary = 256

    def __init__(self, max_length: int = 0) -> None:
        self.max_length = max_length or 128

    def __call__(self, texts: Sequence[str]) -> Arrays:
        """input_ids and attention_mask [n, length], padded to the longest; texts are cut to max_length."""
        rows = [text.encode("utf-8", "replace")[: self.max_length] for text in texts]
        return padded([list(row) for row in rows])


class HashedWords:
    """The tokens of the model `embedding`: 1 + a hash of each word; 0 is padding.

    It has no vocabulary, so that a further text has the same tokens whatever texts were trained on.
    """

    def __init__(self, words: int, max_length: int = 0) -> None:
        self.words, self.max_length = words, max_length or 128

    def __call__(self, texts: Sequence[str]) -> Arrays:
        """input_ids and attention_mask [n, length], padded to the longest; texts are cut to max_length."""
        lists = [_words_of(text)[: self.max_length] for text in texts]
        return padded([[1 + _hash(word) % self.words for word in words] for words in lists])


class WordsAndPairs:
    """The tokens of the model `words`: each word of a text once, and then each pair of neighbours once.

    A word is 1 + its hash, a pair 1 + words + its hash, and 0 is padding. How often a word is repeated tells less than
    that it is there, and a repeated word would hide the others.
    """

    def __init__(self, words: int, pairs: int, max_length: int = 0) -> None:
        self.words, self.pairs, self.max_length = words, pairs, max_length or 512

    def __call__(self, texts: Sequence[str]) -> Arrays:
        """input_ids and attention_mask [n, length], padded to the longest; texts are cut to max_length words."""
        return padded([self._tokens(_words_of(text)[: self.max_length]) for text in texts])

    def _tokens(self, words: Sequence[str]) -> list[int]:
        of_words = {1 + _hash(word) % self.words for word in words}
        if not self.pairs:
            return sorted(of_words)
        neighbours = {f"{word} {after}" for word, after in pairwise(words)}
        return sorted(of_words | {1 + self.words + _hash(pair) % self.pairs for pair in neighbours})


def _words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))
