"""native/ucx_api.hpp against the headers of the libucx wheel: offsets, sizes, values."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

# structure of ours, of UCX, fields that must be where UCX has them
STRUCTURES = {
    ("Params", "ucp_params_t"): "field_mask features request_size request_init request_cleanup "
    "tag_sender_mask mt_workers_shared estimated_num_eps estimated_num_ppn name",
    ("WorkerParams", "ucp_worker_params_t"): "field_mask thread_mode cpu_mask events user_data "
    "event_fd flags",
    ("WorkerAttr", "ucp_worker_attr_t"): "field_mask thread_mode address_flags address "
    "address_length max_am_header",
    ("EndpointParams", "ucp_ep_params_t"): "field_mask address err_mode err_handler user_data "
    "flags",
    ("AmRecvParam", "ucp_am_recv_param_t"): "recv_attr reply_ep",
    ("AmHandlerParam", "ucp_am_handler_param_t"): "field_mask id flags cb arg",
    ("Iov", "ucp_dt_iov_t"): "buffer length",
    ("RequestParam", "ucp_request_param_t"): "op_attr_mask flags request cb datatype user_data "
    "reply_buffer memory_type recv_info",
}
VALUES = {
    "kFeatureWakeup": "UCP_FEATURE_WAKEUP", "kFeatureAm": "UCP_FEATURE_AM",
    "kParamFeatures": "UCP_PARAM_FIELD_FEATURES",
    "kWorkerThreadMode": "UCP_WORKER_PARAM_FIELD_THREAD_MODE",
    "kThreadModeSerialized": "UCS_THREAD_MODE_SERIALIZED",
    "kAttrMaxAmHeader": "UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER",
    "kEpAddress": "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS",
    "kEpErrMode": "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE",
    "kEpErrHandler": "UCP_EP_PARAM_FIELD_ERR_HANDLER",
    "kErrModePeer": "UCP_ERR_HANDLING_MODE_PEER", "kAmRecvRndv": "UCP_AM_RECV_ATTR_FLAG_RNDV",
    "kAmHandlerId": "UCP_AM_HANDLER_PARAM_FIELD_ID",
    "kAmHandlerFlags": "UCP_AM_HANDLER_PARAM_FIELD_FLAGS",
    "kAmHandlerCb": "UCP_AM_HANDLER_PARAM_FIELD_CB",
    "kAmHandlerArg": "UCP_AM_HANDLER_PARAM_FIELD_ARG", "kAmWholeMessage": "UCP_AM_FLAG_WHOLE_MSG",
    "kOpCallback": "UCP_OP_ATTR_FIELD_CALLBACK", "kOpUserData": "UCP_OP_ATTR_FIELD_USER_DATA",
    "kOpDatatype": "UCP_OP_ATTR_FIELD_DATATYPE", "kOpFlags": "UCP_OP_ATTR_FIELD_FLAGS",
    "kDatatypeIov": "ucp_dt_make_iov()", "kAmSendEager": "UCP_AM_SEND_FLAG_EAGER",
    "kCloseForce": "UCP_EP_CLOSE_FLAG_FORCE", "kOk": "UCS_OK", "kInProgress": "UCS_INPROGRESS",
}
FUNCTIONS = [
    "ucp_config_modify", "ucp_init_version", "ucp_worker_create", "ucp_worker_query",
    "ucp_worker_get_address",
    "ucp_worker_progress", "ucp_worker_get_efd", "ucp_worker_arm",
    "ucp_worker_set_am_recv_handler", "ucp_ep_create", "ucp_ep_close_nbx", "ucp_am_send_nbx",
    "ucp_request_check_status", "ucp_request_free", "ucs_status_string",
]


def program() -> str:
    lines = ["#include <ucp/api/ucp.h>", "#include <cstddef>", '#include "ucx_api.hpp"']
    for (ours, theirs), fields in STRUCTURES.items():
        lines.append(f"static_assert(sizeof(ucx::{ours}) <= sizeof({theirs}));")
        for field in fields.split():
            lines.append(
                f"static_assert(offsetof(ucx::{ours}, {field}) == offsetof({theirs}, {field}) && "
                f"sizeof(ucx::{ours}::{field}) == sizeof({theirs}::{field}), "
                f'"{theirs}::{field}");'
            )
    for ours, theirs in VALUES.items():
        lines.append(f"static_assert(static_cast<long>(ucx::{ours}) == "
                     f'static_cast<long>({theirs}), "{theirs}");')
    lines.append("template <typename R, typename... A> constexpr int count(R (*)(A...)) "
                 "{ return sizeof...(A); }")
    lines.append("constexpr ucx::Api api{};")
    for name in FUNCTIONS:
        lines.append(f'static_assert(count(decltype(ucx::Api::{name}){{}}) == '
                     f'count(decltype(&::{name}){{}}), "{name}");')
    lines.append("static_assert(sizeof(ucx::Status) == sizeof(ucs_status_t));")
    return "\n".join(lines) + "\n"


def headers() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) / "include" if places else None


def compile_(source: str, folder: Path, include: Path) -> subprocess.CompletedProcess:
    path = folder / "abi.cpp"
    path.write_text(source)
    native = Path(__file__).parents[2] / "src" / "expertwire" / "native"
    return subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-w", f"-I{include}",
         f"-I{native}", str(path)], capture_output=True, text=True, timeout=100,
    )


def test_declarations_are_those_of_the_wheel(request, tmp_path):
    include = headers()
    if include is None or not shutil.which("g++"):
        reason = "needs the headers of the libucx wheel and g++"
        if request.config.getoption("--ucx"):
            pytest.fail(reason)
        pytest.skip(reason)
    done = compile_(program(), tmp_path, include)
    assert done.returncode == 0, done.stderr
    wrong = program().replace("sizeof(ucx::Iov::buffer)", "1 + sizeof(ucx::Iov::buffer)")
    assert "ucp_dt_iov_t::buffer" in compile_(wrong, tmp_path, include).stderr
