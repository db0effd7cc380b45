"""Pages of the documentation site that are generated from the code; MkDocs calls the functions that begin with `on_`.

Generated: the reference of the commands, and a page for each source file that a page links to.
Links out of docs/, as a reader of the repository needs them, are rewritten to the generated pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


# -- called by MkDocs --------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Adds a page for each algorithm to the navigation."""
    pages = [{"Overview": "algorithms/index.md"}]
    pages += [
        {title: f"algorithms/{name}.md"}
        for name, title in titles(Path(config.docs_dir) / "algorithms").items()
    ]
    config.nav = [_section(entry, pages) for entry in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    generated = {"commands.md": commands()}
    generated |= {
        page: (ROOT / source).read_text("utf-8") for source, page in ROOT_PAGES.items() if page != "index.md"
    }
    written = {
        file.src_uri: Path(file.abs_src_path).read_text("utf-8") for file in files.documentation_pages()
    }
    for page, text in {**written, **generated}.items():
        for path in linked_sources(folder_of(page), text):
            generated[source_page(path)] = as_source(path)
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links out of docs/ to their pages in the site."""
    here = page.file.src_uri
    return LINK.sub(lambda match: relinked(here, match[1]) + (match[2] or ""), markdown)


# -- links -------------------------------------------------------------------------------------------------------------


def folder_of(page: str) -> PurePosixPath:
    """The folder of the page's source in the repository."""
    sources = {page: source for source, page in ROOT_PAGES.items() if page != "index.md"}
    return PurePosixPath(sources.get(page, f"docs/{page}")).parent


def target_of(folder: PurePosixPath, link: str) -> str:
    """The path in the repository that a link points to."""
    return os.path.normpath(folder / link)


def linked_sources(folder: PurePosixPath, text: str) -> Iterator[str]:
    """The files outside docs/ that a page links to, without those that are pages themselves."""
    for link, _ in LINK.findall(text):
        target = target_of(folder, link)
        if not target.startswith("docs") and target not in ROOT_PAGES and (ROOT / target).is_file():
            yield target


def source_page(path: str) -> str:
    return f"source/{path}.md"


def relinked(page: str, link: str) -> str:
    """The link as used in the site."""
    target = target_of(folder_of(page), link)
    if target in ROOT_PAGES:
        place = ROOT_PAGES[target]
    elif target == "docs" or target.startswith("docs/"):
        place = target.removeprefix("docs").removeprefix("/")
        place = f"{place}/index.md".lstrip("/") if (ROOT / target).is_dir() else place
    elif (ROOT / target).is_file():
        place = source_page(target)
    else:
        return link  # MkDocs reports it
    return os.path.relpath(place, PurePosixPath(page).parent)


# -- generated pages ---------------------------------------------------------------------------------------------------


def titles(folder: Path) -> dict[str, str]:
    """The heading of every algorithm's page, CO-PFL's first."""
    pages = sorted(set(folder.glob("*.md")) - {folder / "index.md"})
    found = {page.stem: page.read_text("utf-8").splitlines()[0].lstrip("# ") for page in pages}
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "copfl", name))}


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


def _section(entry: Any, pages: list[dict[str, str]]) -> Any:
    """An entry of the navigation, with the pages of the algorithms inserted."""
    ((title, inside),) = entry.items()
    return {title: pages} if inside == "algorithms/" else entry
