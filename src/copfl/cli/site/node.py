"""`copfl site node`: a node with every option."""

from pathlib import Path
from typing import Annotated

from copfl.cli.federate.options import LogFormat, LogLevel, app_config, require_flower, set_environment
from copfl.cli.options import option


def node(
    *,
    superlink: Annotated[str, option("Federation", "Address of the server, HOST:PORT.")],
    data: Annotated[
        str | None, option("Data", "The node's data: a file, a folder or module:function.", "--data -d")
    ] = None,
    state_dir: Annotated[
        Path | None, option("Output", "Folder of the node's state, its personal model.")
    ] = None,
    client: Annotated[
        int | None, option("Federation", "The client's number; default: the server's choice.")
    ] = None,
    root_certificates: Annotated[
        Path | None, option("Federation", "The authority's ca.pem; default: without TLS.")
    ] = None,
    key: Annotated[Path | None, option("Federation", "The node's private key.")] = None,
    coordinator: Annotated[
        str | None,
        option(
            "Federation",
            "Whose proposals this node accepts: coordinator.pub, or its fingerprint; default: the policy's.",
        ),
    ] = None,
    policy: Annotated[
        Path | None, option("Federation", "What this node allows; default: policy.toml in its state-dir.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("Training", "Another key of the node, such as threads=4; repeatable.", "--set -s"),
    ] = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run a node without an invitation, until the command is ended."""
    require_flower()
    set_environment(None, log_format, log_level)  # a node has no metrics
    from copfl.federation.machines.supernode import Address, serve

    config = app_config(settings, data=data, client=client)
    if state_dir is not None:
        config["state-dir"] = str(state_dir.expanduser().absolute())
    if policy is not None:
        config["policy"] = str(policy.expanduser().absolute())
    if coordinator is not None:
        from copfl.federation.protocol.keys import fingerprint, read_public

        file = Path(coordinator).expanduser()
        config["coordinator"] = fingerprint(read_public(file)) if file.exists() else coordinator
    address = Address(superlink, root_certificates, key)
    serve(address, config)
