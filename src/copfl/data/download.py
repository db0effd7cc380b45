"""Downloads of published data sets from their own addresses: resumed after an interruption, and verified.

Not pooch: its downloads start over after an interruption, and CIFAR-10-C has 2.9 GB.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from copfl.data.reading import naming
from copfl.errors import DataError, UsageError, unknown

Progress = Callable[[int, int | None], None]  # bytes so far, and in total if the server reports it

TIMEOUT = 30  # seconds without a byte
TORONTO, GITHUB = "https://www.cs.toronto.edu/~kriz", "https://raw.githubusercontent.com"
CHUNK = 2**20


class File(NamedTuple):
    """A published file."""

    url: str
    digest: str  # md5 or sha256 as published; empty: none is known, and the file is not compared
    path: str  # in the data folder


def _files(address: str, digests: dict[str, str], folder: str = "") -> tuple[File, ...]:
    """Files of one address, in the data folder or in a folder there."""
    return tuple(
        File(f"{address}/{name}", digest, str(Path(folder, name))) for name, digest in digests.items()
    )


PUBLISHED: dict[str, tuple[File, ...]] = {
    "cifar10": _files(TORONTO, {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}),
    "cifar10c": _files(
        "https://zenodo.org/records/2535967/files", {"CIFAR-10-C.tar": "56bf5dcef84df0e2308c6dcbcbbd8499"}
    ),
    "cifar100": _files(TORONTO, {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}),
    "cinic10": _files(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192",
        {"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
    ),
    "fashion_mnist": _files(
        f"{GITHUB}/zalandoresearch/fashion-mnist/master/data/fashion",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        "fashion_mnist",
    ),
    "svhn": _files(
        "http://ufldl.stanford.edu/housenumbers",
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
        "svhn",
    ),
    "tiny_imagenet": _files(
        "http://cs231n.stanford.edu", {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"}
    ),
    "uci_har": _files(  # the archive publishes no checksum
        "https://archive.ics.uci.edu/static/public/240",
        {"human+activity+recognition+using+smartphones.zip": ""},
    ),
    "ag_news": _files(
        f"{GITHUB}/mhjabreel/CharCnn_Keras/master/data/ag_news_csv",
        {
            "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
            "test.csv": "d52ea96a97a2d943681189a97654912d",
        },
        "ag_news_csv",
    ),
    "sst2": _files(
        "https://dl.fbaipublicfiles.com/glue/data", {"SST-2.zip": "9f81648d4199384278b86e315dac217c"}
    ),
    "banking77": _files(
        f"{GITHUB}/PolyAI-LDN/task-specific-datasets/master/banking_data",
        {
            "train.csv": "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b",
            "test.csv": "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d",
        },
        "banking77",
    ),
    "clinc150": _files(
        f"{GITHUB}/clinc/oos-eval/master/data",
        {
            "data_full.json": "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
            "domains.json": "b947b579d3b8e74b06f93b01083d8efaff2888b43a3e362533bd88a6e1211b3a",
        },
        "clinc150",
    ),
}
GET = "Get it with: copfl data get {name} --data-dir DIR"
INSTALL = "It comes with scikit-learn: pip install scikit-learn"
LEAF = (
    "LEAF (https://github.com/TalwalkarLab/leaf) makes it with its preprocess.sh; put data/{name}/data into "
    "the data folder as {name}, with train/*.json and test/*.json"
)
DOMAINS = "It has no open address; put its images into the data folder as {folder}/<domain>/<class>/*.jpg"
ADVICE = {
    "digits": INSTALL,
    "breast_cancer": INSTALL,
    "wine": INSTALL,
    "diabetes": INSTALL,
    "cifar10c": f"{GET}; or get cifar10, and the corruptions are made from it",
    "mini_imagenet": "Mini-ImageNet has no open address: register at https://image-net.org, take the images "
    "named in the split files of Ravi & Larochelle, and put them into the data folder as mini-imagenet.tar "
    "or mini-imagenet/{{train,test}}/<wnid>/*.jpg, all 100 classes in both splits",
    "pacs": DOMAINS.replace("{folder}", "PACS"),
    "office_caltech10": DOMAINS.replace("{folder}", "office_caltech_10"),
    "digits_five": "It has no open address; put its Matlab files (mnist_data.mat, mnistm_with_label.mat, "
    "svhn_train_32x32.mat, svhn_test_32x32.mat, syn_number.mat, usps_28x28.mat) into Digit-Five/",
    "femnist": LEAF,
    "shakespeare": LEAF,
}


def advice(name: str) -> str:
    """How to obtain a data set, in one sentence."""
    return ADVICE.get(name, GET).format(name=name)


def get(name: str, data_dir: Path, progress: Progress | None = None, url: str | None = None) -> Path:
    """The file, or the folder of several, of a published data set in `data_dir`, fetched unless it exists.

    `url` is another address of a data set of one file.
    """
    if name in ADVICE and name not in PUBLISHED:
        raise DataError(f"{name} cannot be fetched. {advice(name)}")
    if name not in PUBLISHED:
        raise unknown("data set to get", name, PUBLISHED)
    files = PUBLISHED[name]
    if url and len(files) > 1:
        raise UsageError(f"{name} has {len(files)} files, so --url cannot name them; leave it out")
    paths = [fetch(url or file.url, data_dir / file.path, file.digest, progress) for file in files]
    return paths[0] if len(paths) == 1 else paths[0].parent


def is_pinned(name: str) -> bool:
    """Whether the checksums of all files of a data set are known."""
    return all(file.digest for file in PUBLISHED[name])


def fetch(url: str, target: Path, digest: str, progress: Progress | None = None) -> Path:
    """`target`, with the content of `url`; an interrupted download in `target`.part is continued.

    `digest` is its md5 or sha256; without one the content is not compared.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f'address "{url}" is not supported; it must begin with https:// or http://')
    if target.exists():
        if wrong := _difference(target, digest):
            raise DataError(f"{target} exists, but has {wrong}; delete it first")
        return target
    part, parsed = target.with_name(target.name + ".part"), urllib.parse.urlsplit(url)
    # In messages the address has neither the password before the host nor a token behind the path.
    shown = f"{parsed.scheme}://{parsed.netloc.rpartition('@')[2]}{parsed.path}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _continue(url, part, progress)
        if wrong := _difference(part, digest):
            part.unlink()
            raise DataError(
                f"{shown} has {wrong}; it has been removed. Get it again, or from another address (--url)"
            )
        os.replace(part, target)
    except urllib.error.HTTPError as error:
        with error:
            answer = f"{error.code} {error.reason}"
        raise DataError(f"{shown} answers {answer}; name another address with --url") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        message = f"{shown} cannot be reached: {reason}. Run the same command again to continue"
        raise DataError(message) from error
    except OSError as error:
        raise DataError(f"{part} cannot be written: {error.strerror or error}") from error
    return target


def _difference(path: Path, digest: str) -> str:
    """Such as "md5 0a... instead of 1b..."; empty if the file has this digest, or if none is known."""
    if not digest:
        return ""
    kind = "md5" if len(digest) == 32 else "sha256"
    with naming(str(path)), path.open("rb") as file:
        found = hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()
    return "" if found == digest else f"{kind} {found} instead of {digest}"


def _continue(url: str, part: Path, progress: Progress | None) -> None:
    """Appends to `part` the bytes of `url` that it lacks."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not done:
            raise
        error.close()
        return  # there are no further bytes: the part is complete or too long, and the checksum decides
    with response:
        span = response.headers.get("Content-Range", "")
        if response.status != http.HTTPStatus.PARTIAL_CONTENT or not span.startswith(f"bytes {done}-"):
            done = 0  # the server sends the whole file
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the transfer ended after {done:,} of {total:,} bytes")
