"""`copfl site`: its commands in the order of use."""

import typer

from copfl.cli import options, upkeep
from copfl.cli.site import join, node, owner

app = typer.Typer(
    help="For whoever owns data: take part in a federation. Its coordinator has `copfl federate`.",
    cls=options.PanelGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
)
PANELS: dict[str, list[options.Function]] = {
    "In this order": [options.reading(join.join), join.report, join.predict, upkeep.status, join.leave],
    "More": [
        *(options.reading(join.start), owner.approve, owner.log, owner.check, owner.policy),
        *(owner.key, owner.rotate, node.node, upkeep.backup, upkeep.restore, upkeep.clean),
    ],
}
options.add_panels(app, PANELS)
