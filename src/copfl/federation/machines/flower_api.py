"""Every private name of Flower that copfl uses, in one place; its contract test fails first when one changes.

`flwr.app`, `flwr.serverapp` and `flwr.clientapp` are Flower's public interface, and are imported where they are
used. The names here are not: a release of Flower may move or rename them. Each is imported on first use, because
the modules of the SuperLink take a second to load.
"""

import importlib
from typing import Any

# The name here -> the module of Flower, and the name there; without a name it is the module itself.
PRIVATE = {
    # configuration of an app
    "get_fab_config": "flwr.common.config:get_fab_config",
    "get_fused_config_from_fab": "flwr.common.config:get_fused_config_from_fab",
    "flatten_dict": "flwr.common.config:flatten_dict",
    "fuse_dicts": "flwr.common.config:fuse_dicts",
    "user_config_from_proto": "flwr.common.serde:user_config_from_proto",
    # messages, and the objects that they consist of
    "MessageProto": "flwr.proto.message_pb2:Message",
    "message_from_proto": "flwr.common.serde:message_from_proto",
    "message_to_proto": "flwr.common.serde:message_to_proto",
    "ObjectPullError": "flwr.supercore.inflatable.inflatable_utils:ObjectPullError",
    "ObjectPushError": "flwr.supercore.inflatable.inflatable_utils:ObjectPushError",
    "get_all_nested_objects": "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects",
    "get_object_tree": "flwr.supercore.inflatable.inflatable_object:get_object_tree",
    "no_object_id_recompute": "flwr.supercore.inflatable.inflatable_object:no_object_id_recompute",
    "pull_and_inflate_object_from_tree": (
        "flwr.supercore.inflatable.inflatable_utils:pull_and_inflate_object_from_tree"
    ),
    "pull_objects": "flwr.supercore.inflatable.inflatable_utils:pull_objects",
    "push_objects": "flwr.supercore.inflatable.inflatable_utils:push_objects",
    # the connection of a node
    "ActivateNodeRequest": "flwr.proto.fleet_pb2:ActivateNodeRequest",
    "DeactivateNodeRequest": "flwr.proto.fleet_pb2:DeactivateNodeRequest",
    "FleetHttpClient": "flwr.supernode.fleet_http_client:FleetHttpClient",
    "HeartbeatFailure": "flwr.supercore.heartbeat:HeartbeatFailure",
    "NodeAuthHttpInterceptor": "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor",
    "RegisterNodeFleetRequest": "flwr.proto.fleet_pb2:RegisterNodeFleetRequest",
    "RunNotRunningException": "flwr.supercore.run:RunNotRunningException",
    "RuntimeVersionHttpInterceptor": (
        "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor"
    ),
    "SYSTEM_TIME_TOLERANCE": "flwr.common.constant:SYSTEM_TIME_TOLERANCE",
    "TIMESTAMP_TOLERANCE": "flwr.common.constant:TIMESTAMP_TOLERANCE",
    "fleet_http_connection": "flwr.supernode.fleet_http_connection:",
    "http_request_response": "flwr.supernode.fleet_http_connection:http_request_response",
    "public_key_to_bytes": "flwr.supercore.primitives.asymmetric:public_key_to_bytes",
    # the SuperLink
    "ApiErrorCode": "flwr.supercore.error:ApiErrorCode",
    "FlowerError": "flwr.supercore.error:FlowerError",
    "ListNodesRequest": "flwr.proto.control_pb2:ListNodesRequest",
    "RegisterNodeRequest": "flwr.proto.control_pb2:RegisterNodeRequest",
    "UTCFormatter": "flwr.supercore.http_logging:UTCFormatter",
    "UnregisterNodeRequest": "flwr.proto.control_pb2:UnregisterNodeRequest",
    "control_handlers": "flwr.superlink.servicer.control.control_handlers:",
    "extensions": "flwr.superlink.extensions:",
    "flower_superlink": "flwr.superlink.cli:flower_superlink",
    "sql_corestate": "flwr.supercore.corestate.sql_corestate:",
    "superlink_module": "flwr.superlink.cli.flower_superlink:",
    "init_http_client_from_connection": "flwr.cli.utils:init_http_client_from_connection",
    "read_superlink_connection": "flwr.cli.flower_config:read_superlink_connection",
}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = PRIVATE[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
