"""Where bundles are: in a run folder, at a node, or alone. Without torch, so that a wrong path is said at once."""

from pathlib import Path

from copfl.errors import RunError, UsageError, in_words, to_repeat, to_resume
from copfl.settings import toml

FILE = "bundle.json"
BASE = "base"  # the folder of what all bundles of a run have in common
OF_SERVER = "global"  # the folder of the global model
OF_NODE = "model"  # the folder of a client's model in the folder of a run on its node
CLIENT_OR_GLOBAL = "--client NUMBER (or the client's name), or --global"
SHOWN = 10  # names of clients in a message


def located(path: Path, client: int | str | None = None) -> Path:
    """The folder of a bundle: the path itself, a client's in a run folder, or a node's.

    Args:
        path: A bundle, a run folder or the folder of a node.
        client: Its number or name, in a run folder.
    """
    if (path / FILE).is_file():
        if client is not None:
            raise UsageError(f"{path} is the bundle of one model; leave out the client")
        return path
    if node_bundle := of_node(path):
        if client is not None:
            raise UsageError(f"{path} is of a node, which has the model of one client; leave out the client")
        return node_bundle
    models = path / "models"
    if not path.exists():
        raise RunError(f"there is no folder {path}; name a bundle, a run folder or the state-dir of a node")
    if not (path / "run.toml").is_file():
        raise RunError(f"{path} is neither a bundle (it has no {FILE}) nor a run folder (it has no run.toml)")
    if client is None:
        in_python = 'client=3, client="its name", or client="global"'
        raise UsageError(f"name the model: {in_words(CLIENT_OR_GLOBAL, in_python)}")
    if not (models / OF_SERVER / FILE).is_file():
        if any(models.glob("*.safetensors")):
            raise RunError(
                f"{path} is of an earlier version of copfl, whose models lack what their use needs; run it "
                f"again: {to_repeat(path)}"
            )
        are_kept = toml.read_file(path / "run.toml").get("run", {}).get("save_models", True)
        if not are_kept:
            again = to_repeat(path, save_models=True)
            raise RunError(f"{models} has no bundles, as run.save_models is off; {again} makes them")
        raise RunError(
            f"{models} has no bundles: they are written when a run ends. {to_resume(path)} ends it"
        )
    return models / (OF_SERVER if client == OF_SERVER else f"client-{number_of(models, client):04d}")


def of_node(path: Path) -> Path | None:
    """The bundle in the state-dir of a node, of its last run, or in its folder of one run."""
    bundles = [*path.glob(f"{OF_NODE}/{FILE}"), *path.glob(f"*/{OF_NODE}/{FILE}")]
    return max(bundles, key=lambda file: file.stat().st_mtime).parent if bundles else None


def number_of(models: Path, client: int | str) -> int:
    """The number of a client; a text may also be its name in the data's client column, or "0 (north)".

    Args:
        models: The folder of the models of a run.
        client: Its number or name. A text is a name first, so that 3 is the site that the file calls 3.
    """
    folders = sorted(models.glob(f"client-*/{FILE}"))
    text = str(client)
    if text.isdecimal() and not isinstance(client, str):
        known = {int(path.parent.name.removeprefix("client-")) for path in folders}
        if int(text) in known:
            return int(text)
    from copfl.experiment.bundle import description  # with torch: only where a name was given

    names = {d.origin.client: d.origin.name for d in map(description.read, (p.parent for p in folders))}
    shown = {n: f"{n} ({name})" for n, name in names.items()}
    # Where the file numbers its sites, a number is that of the file.
    are_numbered = all(name.isdecimal() for name in names.values())
    by_name = [n for n in names if n is not None and client in (names[n], shown[n])]
    by_number = [n for n in names if n is not None and str(n) == text and not are_numbered]
    for matching in (by_name, by_number):
        if len(matching) == 1:
            return matching[0]
    listed = [name for n, name in names.items() if name != str(n)]
    more = f": {', '.join(listed[:SHOWN])}{', ...' * (len(listed) > SHOWN)}" if listed else ""
    raise UsageError(f"there is no client {client}; the run has clients 0 to {len(names) - 1}{more}")
