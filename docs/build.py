"""Builds the documentation site: `python docs/build.py`, into site/; `serve` shows it, `references` writes docs/.

The pages are docs/ and those of studies/, with some that are generated: the references of Python and of the commands,
and a page for each source file that a page links to. Links, as a reader of the repository needs them, are rewritten to
these. Zensical builds the site from the result, strictly: a link without a target ends it.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"(^```.*?^```$|^~~~.*?^~~~$)", re.MULTILINE | re.DOTALL)
API = re.compile(r"^<!-- api: copfl\.(\w+) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
CODE = (".py", ".pyc")  # in docs/, what is no page
OF_STUDIES = (".md", ".svg")  # in studies/, what is a page or a picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", nargs="?", choices=("build", "serve", "references"), default="build")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site")
    parser.add_argument("--version", help="build into OUT/VERSION, and list it in the selector of versions")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    if given.action == "references":
        for page, text in references().items():
            (DOCS / page).write_text(text, "utf-8")
        return
    build(given.out / given.version if given.version else given.out, bool(given.version))
    if given.version:
        list_version(given.out, given.version)
    if given.action == "serve":
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=given.out)
        print(f"http://127.0.0.1:{given.port}/  (Ctrl-C stops the server)")
        http.server.ThreadingHTTPServer(("127.0.0.1", given.port), handler).serve_forever()


def build(site: Path, versioned: bool = False) -> None:
    """Writes the site into a folder; what Zensical complains of ends it with an error."""
    import tomli_w

    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        write_pages(stage / "docs")
        config = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))
        project = config["project"]
        project["nav"] = [_section(entry) for entry in project["nav"]]
        if versioned:
            project["extra"]["version"] = {"provider": "mike"}  # reads ../versions.json
        (stage / "zensical.toml").write_text(tomli_w.dumps(config), "utf-8")
        words = [sys.executable, "-m", "zensical", "build", "--strict"]
        paths = os.pathsep.join(filter(None, (str(DOCS), os.environ.get("PYTHONPATH"))))  # docs/equations.py
        done = subprocess.run(
            words, cwd=stage, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        if done.returncode or "rror" in done.stderr:
            sys.exit(f"{done.stdout}{done.stderr}")
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(stage / "site", site)


def list_version(folder: Path, version: str) -> None:
    """Adds the version to versions.json, the newest release first; the address of the folder leads to that."""
    path = folder / "versions.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else []
    others = [entry for entry in known if entry["version"] != version]
    entries = [{"version": version, "title": version, "aliases": []}, *others]
    entries.sort(key=lambda entry: entry["version"] == "dev")
    path.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    first = entries[0]["version"]
    page = f'<!doctype html><title>copfl</title><meta http-equiv="refresh" content="0; url={first}/">\n'
    (folder / "index.html").write_text(page, "utf-8")


# -- pages -------------------------------------------------------------------------------------------------------------


def write_pages(folder: Path) -> None:
    """All pages and pictures of the site, generated ones included."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns(*(f"*{end}" for end in CODE), "__pycache__"))
    for path in (path for path in (ROOT / "studies").rglob("*") if path.suffix in OF_STUDIES):
        copy = folder / page_of(path.relative_to(ROOT).as_posix())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    pages = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.md")}
    pages["api.md"] = API.sub(lambda found: reference(found[1]), pages["api.md"])
    pages |= references()
    for source, page in ROOT_PAGES.items():
        if page != "index.md":
            pages[page] = (ROOT / source).read_text("utf-8")
    sources = {path for page, text in pages.items() for path in linked_sources(folder_of(page), text)}
    pages |= {source_page(path): as_source(path) for path in sources}
    for page, text in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text if page.startswith("source/") else relinked_page(page, text), "utf-8")


def references() -> dict[str, str]:
    """The pages that are written from the code, and are in docs/ too, for whoever reads a clone."""
    return {"commands.md": commands(), "settings.md": settings()}


def settings() -> str:
    """The page of all settings, from the records and the signatures."""
    from copfl.settings.json_schema import reference as tables

    about = (
        "The tables and keys of `run.toml`. On the command line a key is its option, or `--set TABLE.KEY=VALUE`; in "
        "Python it is a keyword of `copfl.run`. Below a table are the options of each choice, with their defaults. "
        "`copfl schema` prints a JSON Schema, with which an editor completes and checks the file: "
        "`copfl schema > run.schema.json`, and "
        "`#:schema run.schema.json` as the first line of the file."
    )
    return f"# Settings\n\n{about}\n\n{tables()}"


def _section(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the navigation, with a page for each algorithm inserted."""
    ((title, inside),) = entry.items()
    if inside != "algorithms/":
        return entry
    pages = [{name: f"algorithms/{page}.md"} for page, name in titles(DOCS / "algorithms").items()]
    return {title: [{"Overview": "algorithms/index.md"}, *pages]}


def titles(folder: Path) -> dict[str, str]:
    """The heading of every algorithm's page, CO-PFL's first."""
    pages = sorted(set(folder.glob("*.md")) - {folder / "index.md"})
    found = {page.stem: page.read_text("utf-8").splitlines()[0].lstrip("# ") for page in pages}
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "copfl", name))}


def as_source(path: str) -> str:
    """A page that shows a file."""
    text = (ROOT / path).read_text("utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}````\n"


# -- links -------------------------------------------------------------------------------------------------------------


def folder_of(page: str) -> PurePosixPath:
    """The folder of the page's source in the repository."""
    sources = {page: source for source, page in ROOT_PAGES.items() if page != "index.md"}
    usual = page if page.startswith("studies/") else f"docs/{page}"
    return PurePosixPath(sources.get(page, usual)).parent


def page_of(path: str) -> str:
    """The page or picture of the site that a file of the repository is; otherwise the page that shows it."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("studies/") and path.endswith(OF_STUDIES):
        return path.replace("README.md", "index.md")
    return source_page(path)


def target_of(folder: PurePosixPath, link: str) -> str:
    """The path in the repository that a link points to."""
    return os.path.normpath(folder / link)


def linked_sources(folder: PurePosixPath, text: str) -> Iterator[str]:
    """The files that a page links to, without those that are pages themselves."""
    for link, _ in LINK.findall(text):
        target = target_of(folder, link)
        if page_of(target) == source_page(target) and (ROOT / target).is_file():
            yield target


def source_page(path: str) -> str:
    return f"source/{path}.md"


def relinked_page(page: str, text: str) -> str:
    """The page with the links of the site; code is left alone."""

    def rewritten(found: re.Match[str]) -> str:
        return relinked(page, found[1]) + (found[2] or "")

    parts = FENCED.split(text)
    return "".join(part if place % 2 else LINK.sub(rewritten, part) for place, part in enumerate(parts))


def relinked(page: str, link: str) -> str:
    """The link as used in the site."""
    target = target_of(folder_of(page), link)
    if (ROOT / target).is_dir():
        target = f"{target}/index.md"
    is_page = target in ROOT_PAGES or target.startswith("docs/")  # or will be: the references are generated
    if not is_page and not (ROOT / target).is_file():
        return link  # Zensical reports it
    return os.path.relpath(page_of(target), PurePosixPath(page).parent)


# -- references --------------------------------------------------------------------------------------------------------


def reference(name: str) -> str:
    """The signature and the docstring of a public name; of a class, those of its public members too."""
    import copfl

    found = getattr(copfl, name)
    if not callable(found):
        return ""
    text = f"{_signature(name, found)}{_docstring(found)}"
    if inspect.isclass(found):
        members = inspect.getmembers(found, lambda one: inspect.isfunction(one) or isinstance(one, property))
        rows = [_member(name, member) for name, member in members if not name.startswith("_")]
        text += "\n\n| member | result |\n| --- | --- |\n" + "\n".join(rows)
    return text


def _signature(name: str, found: Any) -> str:
    if inspect.isclass(found):
        return ""
    lines = [
        f"    {parameter},".replace("'", "") for parameter in inspect.signature(found).parameters.values()
    ]
    return f"```text\ncopfl.{name}(\n" + "\n".join(lines) + "\n)\n```\n\n"


def _docstring(found: Any) -> str:
    """Its paragraphs; sessions of the interpreter as code."""
    paragraphs = (inspect.getdoc(found) or "").split("\n\n")
    return "\n\n".join(f"```pycon\n{text}\n```" if text.startswith(">>>") else text for text in paragraphs)


def _member(name: str, member: Any) -> str:
    arguments = "" if isinstance(member, property) else "()"
    first = _docstring(member).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return f"| `{name}{arguments}` | {first} |"


def commands() -> str:
    """The reference of the command line, from the commands themselves."""
    import typer

    from copfl.cli.main import app

    intro = "# The command line\n\nGenerated from `--help`. `copfl --version` prints the version."
    return intro + "\n" + "".join(_command(typer.main.get_command(app), "copfl"))


def _command(command: Any, name: str) -> Iterator[str]:
    import click

    nested = getattr(command, "commands", None)
    if name != "copfl":
        yield f"\n## {name}\n\n{(command.help or '').strip()}\n"
    if nested:
        for word, inner in nested.items():
            yield from _command(inner, f"{name} {word}")
        return
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n```text\n{name} {usage}\n```\n"
    rows = [
        row_of(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)
    ]
    cells = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    yield f"\n| name | meaning | default |\n| --- | --- | --- |\n{cells}" if rows else ""


def row_of(parameter: Any, context: Any) -> tuple[str, str, str]:
    """The names of a parameter, what it does, and its default, which is never empty."""
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    text, default = _with_default(text, parameter)
    if parameter.param_type_name == "argument":
        return f"`{parameter.make_metavar(context)}`", text, default
    kind = "" if parameter.is_flag else f" `{parameter.make_metavar(context)}`"
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts]) + kind
    return names, text, default


def _with_default(text: str, parameter: Any) -> tuple[str, str]:
    """The help without its last words, "; default: ...", and these; or the default of the code."""
    said = re.fullmatch(r"(.*?)[;,] default: (.+?)\.?", text)
    if said:
        return f"{said[1].rstrip('.')}.", said[2]
    if text.endswith("; required."):
        return f"{text.removesuffix('; required.')}.", "required"
    if parameter.required:
        return text, "required"
    default = parameter.default
    if parameter.is_flag if hasattr(parameter, "is_flag") else False:
        return text, "on" if default else "off"
    if default in (None, (), []) or callable(default):
        return text, "none"
    return text, f"`{default}`"


if __name__ == "__main__":
    main()
