"""The device code's structures and kernel arguments, spelled for ctypes.

Each class mirrors the struct of the same name in device/*.cuh field by field; a test compares the
sizes with the compiled ones. Addresses are plain integers (u64).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_uint16, c_uint32, c_uint64

SCOPE_GPU, SCOPE_SYSTEM = 0, 1

# ibgda_device.cuh: Status, Stage
STATUS_NAMES = {
    1: "no free work-queue slot", 2: "error completion", 3: "timed out",
    4: "address not registered",
    5: "too many loaded servers", 6: "bad reply", 7: "peer lost",
}
STAGE_NAMES = {
    1: "route", 2: "pack", 3: "reserve", 4: "submit", 5: "quiet", 6: "put", 7: "poll", 8: "gather",
    9: "reply", 10: "combine",
}
STATUS_COMPLETION_ERROR, STATUS_TIMEOUT, STATUS_BAD_ARGUMENT = 2, 3, 6
STATUS_TOO_MANY_SERVERS, STATUS_PEER_LOST = 5, 7
LOST_DISCONNECTED = 2  # client_failover.cuh: LostServer

DOORBELL_REGISTER, DOORBELL_RECORD_ONLY, DOORBELL_PROXY = 0, 1, 2
DOORBELL_MODES = {
    "register": DOORBELL_REGISTER, "record": DOORBELL_RECORD_ONLY, "proxy": DOORBELL_PROXY,
}
SIGNAL_WRITE, SIGNAL_ADD, SIGNAL_WRITE_IMM = 0, 1, 2


class KernelStatus(ctypes.Structure):
    """The first problem of a launch; code 0 means none."""

    _fields_ = (
        ("code", c_uint32), ("stage", c_uint32), ("peer", c_uint32), ("syndrome", c_uint32),
        ("expected", c_uint64), ("seen", c_uint64), ("wqe_idx", c_uint64),
    )


class IbgdaKey(ctypes.Structure):
    _fields_ = (
        ("begin", c_uint64), ("end", c_uint64), ("key_be", c_uint32), ("reserved", c_uint32),
        ("mapped", c_uint64),
    )


class IbgdaQp(ctypes.Structure):
    _fields_ = (
        ("sq_addr", c_uint64), ("dbrec_addr", c_uint64), ("doorbell_addr", c_uint64),
        ("cq_addr", c_uint64), ("qpn", c_uint32), ("num_wqe", c_uint32), ("scope", c_uint32),
        ("doorbell_mode", c_uint32), ("proxy_addr", c_uint64), ("scratch_addr", c_uint64),
        ("scratch_lkey_be", c_uint32), ("post_lock", c_uint32), ("resv_head", c_uint64),
        ("ready_head", c_uint64), ("prod_idx", c_uint64), ("cons_idx", c_uint64),
        ("error", c_uint64), ("reserved", c_uint64),
    )


class IbgdaPeer(ctypes.Structure):
    _fields_ = (
        ("qps", c_uint64), ("local_keys", c_uint64), ("remote_keys", c_uint64),
        ("num_qps", c_uint32), ("num_local_keys", c_uint32), ("num_remote_keys", c_uint32),
        ("reserved", c_uint32), ("timeout_ns", c_uint64),
    )


class ClientServer(ctypes.Structure):
    _fields_ = (
        ("send_addr", c_uint64), ("request_slot_bytes", c_uint64), ("remote_addr", c_uint64),
        ("reply_addr", c_uint64), ("reply_slot_bytes", c_uint64), ("peer", c_uint64),
        ("previous_seq", c_uint64), ("max_rows", c_uint32), ("max_pairs", c_uint32),
        ("slot_idx", c_uint32), ("server_id", c_uint32), ("in_place", c_uint32),
        ("reserved", c_uint32),
    )


class RouteTables(ctypes.Structure):
    _fields_ = (
        ("batch_size", c_uint64), ("num_pairs", c_uint64), ("row_token", c_uint64),
        ("pair_server", c_uint64), ("pair_row", c_uint64), ("row_stride", c_uint32),
        ("num_servers", c_uint32),
    )


class MessageShape(ctypes.Structure):
    _fields_ = (
        ("hidden_size", c_uint32), ("data_type", c_uint32), ("scale_type", c_uint32),
        ("scale_block", c_uint32), ("experts_per_row", c_uint32), ("num_experts", c_uint32),
        ("reply_mode", c_uint32), ("reply_type", c_uint32), ("client_id", c_uint32),
        ("layer", c_uint32), ("seq", c_uint64), ("epoch", c_uint64),
    )


class ClientRouteArgs(ctypes.Structure):
    _fields_ = (
        ("topk_ids", c_uint64), ("ids_stride", c_uint64), ("expert_servers", c_uint64),
        ("tables", RouteTables), ("num_skipped", c_uint64), ("missing_expert", c_uint64),
        ("id_bytes", c_uint32), ("num_tokens", c_uint32), ("experts_per_row", c_uint32),
        ("num_experts", c_uint32), ("max_replicas", c_uint32), ("reply_mode", c_uint32),
        ("rotation", c_uint32), ("reserved", c_uint32),
    )


class ClientPackArgs(ctypes.Structure):
    _fields_ = (
        ("servers", c_uint64), ("tables", RouteTables), ("shape", MessageShape),
        ("hidden", c_uint64), ("hidden_stride", c_uint64), ("topk_ids", c_uint64),
        ("ids_stride", c_uint64), ("topk_weights", c_uint64), ("weights_stride", c_uint64),
        ("scales", c_uint64), ("scales_stride", c_uint64), ("missing_expert", c_uint64),
        ("id_bytes", c_uint32),
        ("reserved", c_uint32), ("seq", c_uint64),
    )


class ClientPutArgs(ctypes.Structure):
    _fields_ = (
        ("servers", c_uint64), ("tables", RouteTables), ("shape", MessageShape),
        ("status", c_uint64), ("missing_expert", c_uint64), ("max_loaded_servers", c_uint32),
        ("signal_mode", c_uint32), ("seq", c_uint64),
    )


class ClientCombineArgs(ctypes.Structure):
    _fields_ = (
        ("servers", c_uint64), ("tables", RouteTables), ("shape", MessageShape),
        ("output", c_uint64), ("output_stride", c_uint64), ("status", c_uint64),
        ("timeout_ns", c_uint64), ("seq", c_uint64), ("failed", c_uint64),
        ("output_type", c_uint32), ("num_tokens", c_uint32),
    )


class ClientQuantiseArgs(ctypes.Structure):
    _fields_ = (
        ("hidden", c_uint64), ("hidden_stride", c_uint64), ("rows", c_uint64),
        ("scales", c_uint64), ("num_tokens", c_uint32), ("hidden_size", c_uint32),
        ("data_type", c_uint32), ("scale_block", c_uint32),
    )


class ClientSendArgs(ctypes.Structure):
    _fields_ = (
        ("route", ClientRouteArgs), ("pack", ClientPackArgs), ("seq", c_uint64),
        ("arrived", c_uint64), ("counts", c_uint64), ("only_if", c_uint64),
    )


class ClientFailoverArgs(ctypes.Structure):
    _fields_ = (
        ("wait", ClientCombineArgs), ("expert_servers", c_uint64), ("lost", c_uint64),
        ("resend", c_uint64), ("num_experts", c_uint32), ("max_replicas", c_uint32),
    )


class BufferHead(ctypes.Structure):
    """Head of a request, 128 bytes little-endian (docs/wire.md)."""

    _fields_ = (
        ("magic", c_uint32), ("version", c_uint16), ("head_bytes", c_uint16), ("seq", c_uint64),
        ("epoch", c_uint64), ("client_id", c_uint32), ("layer", c_uint32),
        ("hidden_size", c_uint32), ("data_type", c_uint32), ("scale_type", c_uint32),
        ("scale_block", c_uint32), ("num_rows", c_uint32), ("experts_per_row", c_uint32),
        ("num_experts", c_uint32), ("reply_mode", c_uint32), ("reply_type", c_uint32),
        ("reserved0", c_uint32), ("active_bytes", c_uint64), ("payload_bytes", c_uint64),
        ("padding_bytes", c_uint64), ("payload_checksum", c_uint64), ("reserved1", c_uint64),
        ("reserved2", c_uint64), ("head_checksum", c_uint64),
    )


class ReplyHead(ctypes.Structure):
    """Head of a reply, 64 bytes little-endian (docs/wire.md)."""

    _fields_ = (
        ("magic", c_uint32), ("version", c_uint16), ("head_bytes", c_uint16), ("seq", c_uint64),
        ("reason", c_uint32), ("server_id", c_uint32), ("num_rows", c_uint32),
        ("reply_mode", c_uint32), ("hidden_size", c_uint32), ("reply_type", c_uint32),
        ("queue_us", c_uint32), ("experts_us", c_uint32), ("epoch", c_uint64),
        ("head_checksum", c_uint64),
    )


class ServerSlot(ctypes.Structure):
    _fields_ = (
        ("recv_addr", c_uint64), ("recv_slot_bytes", c_uint64), ("reply_addr", c_uint64),
        ("reply_slot_bytes", c_uint64), ("remote_reply_addr", c_uint64), ("peer", c_uint64),
        ("last_seq", c_uint64), ("previous_reply_seq", c_uint64), ("client_id", c_uint32),
        ("open", c_uint32), ("max_rows", c_uint32), ("max_pairs", c_uint32),
        ("slot_idx", c_uint32), ("signal_mode", c_uint32), ("in_place", c_uint32),
        ("reserved", c_uint32),
    )


class ServerMessage(ctypes.Structure):
    _fields_ = (
        ("head", BufferHead), ("slot", c_uint32), ("reason", c_uint32), ("pair_begin", c_uint32),
        ("num_reply_rows", c_uint32), ("queue_ns", c_uint64), ("reserved", c_uint64 * 2),
    )


class ServerModel(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_uint32), ("hidden_size", c_uint32), ("num_experts", c_uint32),
        ("data_type", c_uint32), ("max_experts_per_row", c_uint32), ("allow_fp8", c_uint32),
        ("scale_block", c_uint32), ("reserved", c_uint32),
    )


class ServerPollArgs(ctypes.Structure):
    _fields_ = (
        ("slots", c_uint64), ("messages", c_uint64), ("slot_state", c_uint64),
        ("num_messages", c_uint64), ("num_rows", c_uint64), ("num_pairs", c_uint64),
        ("layer", c_uint64), ("timeout_ns", c_uint64), ("model", ServerModel),
        ("num_slots", c_uint32),
        ("first_slot", c_uint32), ("max_messages", c_uint32), ("max_rows", c_uint32),
    )


class ServerGatherArgs(ctypes.Structure):
    _fields_ = (
        ("slots", c_uint64), ("messages", c_uint64), ("local_expert", c_uint64),
        ("pair_expert", c_uint64), ("expert_offsets", c_uint64), ("cursor", c_uint64),
        ("pair_position", c_uint64), ("pair_reply_row", c_uint64), ("gathered", c_uint64),
        ("gathered_scales", c_uint64), ("expert_rows", c_uint64),
        ("num_messages", c_uint64), ("layer", c_uint64), ("num_local", c_uint32),
        ("num_experts", c_uint32), ("min_rows", c_uint32), ("output_type", c_uint32),
    )


class ServerTakeArgs(ctypes.Structure):
    _fields_ = (("poll", ServerPollArgs), ("gather", ServerGatherArgs))


class ServerReplyArgs(ctypes.Structure):
    _fields_ = (
        ("slots", c_uint64), ("messages", c_uint64), ("pair_position", c_uint64),
        ("pair_reply_row", c_uint64), ("expert_output", c_uint64), ("status", c_uint64),
        ("epoch", c_uint64), ("found", c_uint64), ("arrived", c_uint64),
        ("num_messages", c_uint32), ("hidden_size", c_uint32),
        ("output_type", c_uint32), ("server_id", c_uint32), ("experts_us", c_uint32),
        ("reserved", c_uint32),
    )


class ServerEchoArgs(ctypes.Structure):
    _fields_ = (("poll", ServerPollArgs), ("reply", ServerReplyArgs), ("seen", c_uint64))


class IbgdaOperation(ctypes.Structure):
    _fields_ = (
        ("remote_addr", c_uint64), ("local_addr", c_uint64), ("num_bytes", c_uint64),
        ("value", c_uint64), ("op", c_uint32), ("qp_id", c_uint32), ("message_idx", c_uint32),
        ("reserved", c_uint32),
    )


class IbgdaRunArgs(ctypes.Structure):
    _fields_ = (
        ("peer", c_uint64), ("operations", c_uint64), ("status", c_uint64),
        ("num_operations", c_uint32), ("peer_idx", c_uint32),
    )


class HcaKey(ctypes.Structure):
    _fields_ = (
        ("key", c_uint32), ("access", c_uint32), ("valid", c_uint32), ("pd", c_uint32),
        ("base", c_uint64), ("length", c_uint64), ("mapped", c_uint64), ("reserved", c_uint64),
    )


class HcaQueue(ctypes.Structure):
    _fields_ = (
        ("sq_addr", c_uint64), ("dbrec_addr", c_uint64), ("uar_addr", c_uint64),
        ("cq_addr", c_uint64), ("cq_dbrec_addr", c_uint64), ("proxy_addr", c_uint64),
        ("local_keys", c_uint64), ("remote_keys", c_uint64), ("num_local_keys", c_uint32),
        ("num_remote_keys", c_uint32), ("qpn", c_uint32), ("num_wqe", c_uint32),
        ("num_cqe", c_uint32), ("cq_flags", c_uint32), ("pd", c_uint32), ("scope", c_uint32),
        ("state", c_uint32), ("lost", c_uint32), ("pi", c_uint64), ("ci", c_uint64),
        ("num_cqe_written", c_uint64), ("last_register", c_uint64 * 2), ("last_proxy", c_uint64),
        ("last_record", c_uint32), ("first_syndrome", c_uint32), ("first_error_idx", c_uint64),
        ("num_executed", c_uint64), ("num_errors", c_uint64), ("num_bytes", c_uint64),
        ("remote_shift", c_uint64),
    )


class GpuHcaArgs(ctypes.Structure):
    _fields_ = (
        ("queues", c_uint64), ("stop", c_uint64), ("lifetime_ns", c_uint64),
        ("max_entries", c_uint64), ("num_queues", c_uint32), ("return_when_idle", c_uint32),
    )


class ClockStamp(ctypes.Structure):
    """struct ClockStamp of device/clock_stamp.cuh."""

    _fields_ = (("time_ns", c_uint64), ("mark", c_uint32), ("number", c_uint32))


class ClockStampArgs(ctypes.Structure):
    _fields_ = (("stamps", c_uint64), ("count", c_uint64), ("capacity", c_uint32),
                ("mark", c_uint32))


# Every kernel of the device code and the structure that it takes by value.
KERNEL_ARGS: dict[str, type[ctypes.Structure]] = {
    "client_route": ClientRouteArgs,
    "client_pack": ClientPackArgs,
    "client_put_ibgda": ClientPutArgs,
    "client_put_direct": ClientPutArgs,
    "client_put_sequential": ClientPutArgs,
    "client_quantise": ClientQuantiseArgs,
    "client_send_direct": ClientSendArgs,
    "client_wait": ClientCombineArgs,
    "client_combine": ClientCombineArgs,
    "client_failover": ClientFailoverArgs,
    "server_poll": ServerPollArgs,
    "server_gather": ServerGatherArgs,
    "server_group": ServerGatherArgs,
    "server_gather_rows": ServerGatherArgs,
    "server_take": ServerTakeArgs,
    "server_reply_ibgda": ServerReplyArgs,
    "server_reply_direct": ServerReplyArgs,
    "server_reply_in_place": ServerReplyArgs,
    "server_echo_in_place": ServerEchoArgs,
    "ibgda_run": IbgdaRunArgs,
    "gpu_hca": GpuHcaArgs,
    "clock_stamp": ClockStampArgs,
}

MISSING = c_int32(-1).value
