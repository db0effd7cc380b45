"""What the documentation site is made of besides the pages here; MkDocs calls the functions that begin with `on_`.

Made of the code as the site is built: the page of every command, the list of algorithms, and a page for each source
file that some page links to. Links that lead out of docs/, as a reader of the repository wants them, are led to those.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAPERS = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LATER = (
    "audit.md",
    "privacy.md",
    "hostile.md",
    "reliability.md",
    "reproduction.md",
)  # in the navigation once written
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


# -- what MkDocs calls -------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Fills in the navigation: a page for each algorithm, and what is not there yet left out."""
    pages = [{"All of them": "algorithms/index.md"}]
    pages += [
        {title: f"algorithms/{name}.md"}
        for name, title in titles(Path(config.docs_dir) / "algorithms").items()
    ]
    config.nav = [_section(entry, pages, Path(config.docs_dir)) for entry in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of the code."""
    from mkdocs.structure.files import File

    made = {"commands.md": commands(), "algorithms/index.md": algorithms()}
    made |= {page: (ROOT / paper).read_text("utf-8") for paper, page in PAPERS.items() if page != "index.md"}
    written = {
        file.src_uri: Path(file.abs_src_path).read_text("utf-8") for file in files.documentation_pages()
    }
    for page, text in {**written, **made}.items():
        for path in linked_sources(home_of(page), text):
            made[source_page(path)] = as_source(path)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links out of docs/ to their places in the site."""
    here = page.file.src_uri
    return LINK.sub(lambda match: relinked(here, match[1]) + (match[2] or ""), markdown)


# -- links -------------------------------------------------------------------------------------------------------------


def home_of(page: str) -> PurePosixPath:
    """The folder in the repository whose file the page was written as."""
    papers = {made: paper for paper, made in PAPERS.items() if made != "index.md"}
    return PurePosixPath(papers.get(page, f"docs/{page}")).parent


def target_of(home: PurePosixPath, link: str) -> str:
    """The path in the repository that a link leads to."""
    return os.path.normpath(home / link)


def linked_sources(home: PurePosixPath, text: str) -> Iterator[str]:
    """The files outside of docs/ that a page links to and that are no pages themselves."""
    for link, _ in LINK.findall(text):
        target = target_of(home, link)
        if not target.startswith("docs") and target not in PAPERS and (ROOT / target).is_file():
            yield target


def source_page(path: str) -> str:
    return f"source/{path}.md"


def relinked(page: str, link: str) -> str:
    """The link as the site needs it."""
    target = target_of(home_of(page), link)
    if target in PAPERS:
        place = PAPERS[target]
    elif target == "docs" or target.startswith("docs/"):
        place = target.removeprefix("docs").removeprefix("/")
        place = f"{place}/index.md".lstrip("/") if (ROOT / target).is_dir() else place
    elif (ROOT / target).is_file():
        place = source_page(target)
    else:
        return link  # and MkDocs complains
    return os.path.relpath(place, PurePosixPath(page).parent)


# -- pages made of the code --------------------------------------------------------------------------------------------


def titles(folder: Path) -> dict[str, str]:
    """The heading of every algorithm's page, CO-PFL's first."""
    found = {p.stem: p.read_text("utf-8").splitlines()[0].lstrip("# ") for p in sorted(folder.glob("*.md"))}
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "copfl", name))}


def algorithms() -> str:
    """The list of algorithms, a line each from its own file."""
    from copfl.algorithms import ALGORITHMS

    first = {
        name: (sys.modules[f.__module__].__doc__ or "").split("\n")[0]
        for name, f in sorted(ALGORITHMS.items())
    }
    rows = "\n".join(f"| [`{name}`]({name}.md) | {line} |" for name, line in first.items())
    return (
        "# The algorithms\n\n`copfl run --algorithm NAME`; each page says what the algorithm does, what its options\n"
        "mean, what travels and stays, and where the code departs from the paper.\n\n"
        f"| name | what it does |\n| --- | --- |\n{rows}\n"
    )


def as_source(path: str) -> str:
    """A page that shows a file."""
    text = (ROOT / path).read_text("utf-8")
    language = {".py": "python", ".toml": "toml", ".json": "json"}.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}````\n"


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
        _row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)
    ]
    yield "\n| | | default |\n| --- | --- | --- |\n" + "".join(rows) if rows else ""


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        names, default = f"`{parameter.make_metavar(context)}`", ""
    else:
        kind = "" if parameter.is_flag else f" `{parameter.make_metavar(context)}`"
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts]) + kind
        default = parameter.default
        default = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {names} | {text} | {default} |\n"


def _section(entry: Any, pages: list[dict[str, str]], docs: Path) -> Any:
    """A part of the navigation, with the algorithms in their place and without the pages that are still to come."""
    ((title, inside),) = entry.items()
    if inside == "algorithms/":
        return {title: pages}
    if isinstance(inside, list):
        there = [
            one
            for one in inside
            if (docs / next(iter(one.values()))).exists() or next(iter(one.values())) not in LATER
        ]
        return {title: there}
    return entry
