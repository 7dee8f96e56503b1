"""Bugs to plant into the kernels that poll, gather, reply, send directly, combine and fail over."""

from __future__ import annotations

from tests.schedules.mutations import Mutation

POLL, GATHER, REPLY = "server_poll.cuh", "server_gather.cuh", "server_reply.cuh"
SEND, COMBINE, GRID, FAILOVER, ECHO = (
    "client_send.cuh", "client_combine.cuh", "grid.cuh", "client_failover.cuh", "server_echo.cuh")

_REPLY_ROWS = (
    "    if (!ibgda_put_nbi_warp<false>(peer, slot.remote_reply_addr, slot.reply_addr, rows_bytes, "
    "0, 0, status, m)) return;\n"
)
_REPLY_HEAD = (
    "    if (!ibgda_put_nbi_warp<false>(peer, remote_head, local_head, sizeof(ReplyHead), 0, 1, "
    "status, m)) return;\n"
)
_REPLY_FLAG = (
    "    put_flag(peer, remote_flag, slot_flag(slot.reply_addr, slot.reply_slot_bytes), "
    "message.head.seq,\n"
    "             slot.previous_reply_seq, slot.slot_idx, slot.signal_mode, 0, status, m);\n"
)
_WAIT = """  wait_replies(args, seq, &code);
  block_sync();
  if (code != kOk) return fail(args, code);
"""
_HOLD_HEAD = "  const HeldHead held = hold_head(args, first_head());\n"
_ARRIVE = "    fence_acq_rel(Scope::kGpu);\n    if (atomic_add("

MUTATIONS = [
    *(Mutation(
        f"server's flag without acquire, {scenario}", POLL,
        "return load_acquire(at<const u64>(slot_flag(",
        "return load_relaxed(at<const u64>(slot_flag(", scenario,
    ) for scenario in ("rounds", "rounds_direct")),
    *(Mutation(
        f"reply's flag without acquire, {scenario}", COMBINE,
        "(seen = load_acquire(flag, Scope::kSystem)) != seq",
        "(seen = load_relaxed(flag, Scope::kSystem)) != seq", scenario,
    ) for scenario in ("rounds", "rounds_direct", "grids", "failover")),
    Mutation(
        "echo's flag without acquire", ECHO, "load_acquire(at<const u64>(batch.flag[i])",
        "load_relaxed(at<const u64>(batch.flag[i])", "echo",
    ),
    Mutation(
        "echo of what one block saw", ECHO, "    if (count != grid_dim()) continue;",
        "    if (count == 0) continue;", "echo",
    ),
    Mutation(
        "poll takes a message twice", POLL, "    slot.last_seq = seq;\n", "", "rounds",
    ),
    Mutation(
        "poll takes what has not arrived", POLL, "state[i] = flag != slots[i].last_seq;",
        "state[i] = slots[i].open;", "rounds",
    ),
    Mutation(
        "pairs are placed before all are counted", GATHER,
        "  block_sync();\n  if (warp_id() == 0) place_experts(args, cursor);",
        "  if (warp_id() == 0) place_experts(args, cursor);", "rounds",
    ),
    Mutation(
        "rows of a group forgotten", GATHER,
        "    block_sync();  // everybody has read the totals before they are set again\n",
        "    reply_rows = 0;\n", "rounds",
    ),
    Mutation(
        "reply flag before its rows", REPLY, _REPLY_ROWS + _REPLY_HEAD + _REPLY_FLAG,
        _REPLY_FLAG + _REPLY_ROWS + _REPLY_HEAD, "rounds",
    ),
    Mutation(
        "reply flag before its head", REPLY, _REPLY_HEAD + _REPLY_FLAG, _REPLY_FLAG + _REPLY_HEAD,
        "rounds",
    ),
    Mutation(
        "reply is put before all its rows are written", REPLY,
        "    if (thread_idx() == 0) write_reply_head(args, message, slot);\n    block_sync();\n",
        "    if (thread_idx() == 0) write_reply_head(args, message, slot);\n", "rounds",
    ),
    Mutation(
        "reply head read before its flag", COMBINE, _WAIT + _HOLD_HEAD, _HOLD_HEAD + _WAIT,
        "rounds",
    ),
    Mutation(
        "reply of an earlier message taken", COMBINE,
        "(seen = load_acquire(flag, Scope::kSystem)) != seq",
        "(seen = load_acquire(flag, Scope::kSystem)) == 0", "rounds_direct",
    ),
    Mutation(
        "rows added before all replies are in", COMBINE,
        _WAIT, _WAIT.replace("  block_sync();\n", ""), "rounds_direct",
    ),
    Mutation(
        "every block of a direct send releases the flags", SEND,
        "  if (!last_block(args.arrived, senders)) return;\n",
        "  block_sync();\n  if (thread_idx() != 0) return;\n  fence(Scope::kSystem);\n", "grids",
    ),
    Mutation(
        "every block of a reply releases the flags", REPLY,
        "  if (!last_block(args.arrived, num_blocks)) return;\n",
        "  block_sync();\n  if (thread_idx() != 0) return;\n  fence(Scope::kSystem);\n", "grids",
    ),
    Mutation(
        "a block arrives before its stores", GRID, _ARRIVE, "    if (atomic_add(", "grids",
    ),
    Mutation(
        "flags not ordered after the arrivals", GRID, "  fence_acq_rel(Scope::kSystem);\n", "",
        "grids",
    ),
    Mutation(
        "last but one block counts as the last", GRID, "!= num_blocks - 1) return false;",
        "< num_blocks - 2) return false;", "grids",
    ),
    Mutation(
        "a block arrives before its other warps", GRID,
        "  block_sync();  // the block's stores come before its arrival\n", "", "grids",
    ),
    Mutation(
        "a late reply is not waited for", FAILOVER, "    if (is_last_look) return false;\n",
        "    return false;\n", "failover",
    ),
    Mutation(
        "a lost server keeps its experts", FAILOVER,
        "Scope::kSystem) == kNotLost) servers[kept++]",
        "Scope::kSystem) <= kSilent) servers[kept++]", "failover",
    ),
    Mutation(
        "sent again although all have answered", FAILOVER, "  if (num_silent == 0) return;\n", "",
        "failover",
    ),
]
