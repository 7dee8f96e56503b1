"""Bugs to plant into a copy of the sources: what is replaced, and which seeds must notice.

`old` must occur exactly once in the file: a mutation that no longer applies is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

QUEUE, WQE, PUT = "ibgda_device.cuh", "mlx5_wqe.cuh", "client_put.cuh"
ENGINE = "../native/soft_complete.cpp"  # relative to device/, as the others


@dataclass(frozen=True)
class Mutation:
    """One bug. A seed below `seeds` of the scenario must fail."""

    name: str
    file: str
    old: str
    new: str
    scenario: str = "shared_queue"
    seeds: int = 100


_RECORD_THEN_REGISTER = """    ibgda_update_dbr(qp, next_wqe_idx);
    ibgda_ring_db(qp, next_wqe_idx);
"""
_RING = """  if (atomic_max(&qp->prod_idx, next_wqe_idx) < next_wqe_idx) {
    ibgda_update_dbr(qp, next_wqe_idx);
    ibgda_ring_db(qp, next_wqe_idx);
  }
"""
_UNLOCK = "  store_release(&qp->post_lock, 0u, qp_scope(qp));\n"
_COMMENT = (
    "  // The register store must be performed before another producer can ring a later index.\n"
)
_HEAD_PUT = (
    "    if (!ibgda_put_nbi_warp<false>(peer, server.remote_addr, server.send_addr, head_bytes, "
    "qp_id, 1, status, s)) return;\n"
)
_FLAG_PUT = (
    "    put_flag(peer, remote_flag, slot_flag(server.send_addr, server.request_slot_bytes), "
    "args.shape.seq,\n"
    "             server.previous_seq, server.slot_idx, args.signal_mode, qp_id, status, s);\n"
)
_IMMEDIATE = "status, peer_idx, kOpRdmaWriteImm, slot_idx);"
_KNOWN = "  const u64 known = load_acquire(&qp->cons_idx, qp_scope(qp));\n"
_COMPLETED = """\
  const u64 newest_reserved = load_acquire(&qp->resv_head, qp_scope(qp)) - 1;
  const CqeTail tail = cqe_tail(load_acquire(words + 15, qp_scope(qp)));
"""
_CQE_WORDS = """  for (int i = 0; i < 15; ++i) {
    u32 word;
    memcpy(&word, body + 4 * i, 4);
    store_word(entry + 4 * i, word, __ATOMIC_RELAXED);
  }
"""
_CQE_TAIL = """  const u32 owner = (count / n) & 1;  // flips as the ring wraps, even collapsed
  const u32 tail = static_cast<u32>(wqe_idx & 0xffff) << 16 | opcode << 4 | owner;
  store_word(entry + 60, __builtin_bswap32(tail), __ATOMIC_RELEASE);
"""

MUTATIONS = [
    Mutation("flag before head", PUT, _HEAD_PUT + _FLAG_PUT, _FLAG_PUT + _HEAD_PUT, "message"),
    Mutation(
        "immediate before head", PUT, _HEAD_PUT,
        "    if (args.signal_mode == kSignalWriteImm)\n" + _FLAG_PUT + _HEAD_PUT, "message",
    ),
    Mutation(
        "immediate left out", PUT, _IMMEDIATE,
        _IMMEDIATE.replace("kOpRdmaWriteImm", "kOpRdmaWrite"), "message",
    ),
    Mutation(
        "immediate of another slot", PUT, _IMMEDIATE,
        _IMMEDIATE.replace("slot_idx", "slot_idx + 1"), "message",
    ),
    Mutation(
        "immediate in the wrong byte order", QUEUE,
        "wqe_inline_segment(value, num_bytes), {}, bswap32(imm)",
        "wqe_inline_segment(value, num_bytes), {}, imm", "message",
    ),
    Mutation(
        "fetch-add of one too many", PUT, "remote_flag, seq - previous_seq, 8,",
        "remote_flag, seq - previous_seq + 1, 8,", "message",
    ),
    Mutation(
        "direct flag without release", PUT,
        "    fence(Scope::kSystem);\n    store_release(at<u64>(key->mapped",
        "    store_relaxed(at<u64>(key->mapped", "message_direct",
    ),
    Mutation(
        "direct flag of GPU scope", PUT,
        "    fence(Scope::kSystem);\n    store_release(at<u64>(key->mapped + (remote_flag - "
        "key->begin)), seq, Scope::kSystem);",
        "    store_release(at<u64>(key->mapped + (remote_flag - key->begin)), seq, Scope::kGpu);",
        "message_direct",
    ),
    Mutation(
        "register before doorbell record", QUEUE, _RECORD_THEN_REGISTER,
        "    ibgda_ring_db(qp, next_wqe_idx);\n    ibgda_update_dbr(qp, next_wqe_idx);\n",
    ),
    Mutation(
        "no fence before the turn is taken", QUEUE,
        "  fence(qp_scope(qp));\n  u64 deadline = 0, seen;", "  u64 deadline = 0, seen;",
    ),
    Mutation(
        "turn not waited for", QUEUE,
        "while ((seen = atomic_cas(&qp->ready_head, base_idx, base_idx + num_wqes)) != base_idx) {",
        "while ((seen = atomic_max(&qp->ready_head, base_idx + num_wqes), false)) {",
    ),
    Mutation(
        "one index for all lanes", QUEUE,
        "ibgda_write_rdma_write_wqe(qp, base_idx + lane_id(), my_local",
        "ibgda_write_rdma_write_wqe(qp, base_idx, my_local",
    ),
    Mutation(
        "no back-pressure", QUEUE, "if (head + num_wqes - done <= qp->num_wqe) {", "if (true) {",
        "full_ring",
    ),
    Mutation(
        "one slot too many", QUEUE, "if (head + num_wqes - done <= qp->num_wqe) {",
        "if (head + num_wqes - done <= qp->num_wqe + 1) {", "full_ring",
    ),
    Mutation(
        "slots taken by a plain store", QUEUE,
        "      if (atomic_cas(&qp->resv_head, head, head + num_wqes) == head) {",
        "      store_relaxed(&qp->resv_head, head + num_wqes, qp_scope(qp));\n      {",
    ),
    Mutation(
        "last put does not ring", QUEUE, "kAlwaysDoPostSend && num_bytes == 0", "false",
    ),
    Mutation(
        "quiet leaves the tail behind", QUEUE,
        "  ibgda_post_send(peer, qp, target);  // a put", "  // a put",
    ),
    Mutation(
        "quiet by ready_head only", QUEUE,
        "    const u64 done = ibgda_poll_cq(qp);\n    if (ibgda_failed(qp, status, kStageQuiet",
        "    const u64 done = load_relaxed(&qp->ready_head, qp_scope(qp));\n"
        "    if (ibgda_failed(qp, status, kStageQuiet",
    ),
    Mutation(
        "quiet by ready_head only, reads", QUEUE,
        "    const u64 done = ibgda_poll_cq(qp);\n    if (ibgda_failed(qp, status, kStageQuiet",
        "    const u64 done = load_relaxed(&qp->ready_head, qp_scope(qp));\n"
        "    if (ibgda_failed(qp, status, kStageQuiet", "read_back",
    ),
    Mutation(
        "16-bit compare wrong at the wrap", QUEUE,
        "newest_reserved - ((newest_reserved - tail.wqe_counter) & 0xffff)",
        "((newest_reserved & ~0xffffull) | tail.wqe_counter)",
    ),
    Mutation(
        "completion index off by one", QUEUE, "  atomic_max(&qp->cons_idx, completed + 1);\n"
        "  return completed + 1;", "  atomic_max(&qp->cons_idx, completed + 2);\n"
        "  return completed + 2;",
    ),
    Mutation(
        "completion opcode not looked at", QUEUE,
        "  if (tail.opcode == kCqeRequesterError || tail.opcode == kCqeResponderError)",
        "  if (false)", "errors",
    ),
    Mutation(
        "quiet ignores errors", QUEUE,
        "    if (ibgda_failed(qp, status, kStageQuiet, peer_idx)) return false;\n", "", "errors",
    ),
    Mutation(
        "doorbell record word 0", QUEUE, "reinterpret_cast<u32*>(qp->dbrec_addr) + 1",
        "reinterpret_cast<u32*>(qp->dbrec_addr)",
    ),
    Mutation(
        "doorbell record goes to whoever comes last", QUEUE,
        "if (atomic_max(&qp->prod_idx, next_wqe_idx) < next_wqe_idx) {",
        "atomic_max(&qp->prod_idx, next_wqe_idx);\n  {",
    ),
    Mutation(
        "lock released before the doorbell", QUEUE, _RING + _COMMENT + _UNLOCK, _UNLOCK + _RING,
        "full_ring",
    ),
    Mutation(
        "no lock around the doorbell", QUEUE,
        "while (atomic_cas(&qp->post_lock, 0u, 1u) != 0) {", "while (false) {",
        "full_ring",
    ),
    Mutation(
        "GPU scope on a host ring", QUEUE, "return static_cast<Scope>(qp->scope);",
        "return Scope::kGpu;",
    ),
    Mutation(
        "remote key swapped twice", WQE,
        "static_cast<u32>(addr_be >> 32), rkey_be, 0}", "static_cast<u32>(addr_be >> 32), "
        "bswap32(rkey_be), 0}",
    ),
    Mutation(
        "index spills into opmod", WQE,
        "static_cast<u32>(wqe_idx & 0xffff) << 8;\n  return {{bswap32(opcode",
        "static_cast<u32>(wqe_idx) << 8;\n  return {{bswap32(opcode",
    ),
    Mutation(
        "completion read without acquire", QUEUE, "cqe_tail(load_acquire(words + 15",
        "cqe_tail(load_relaxed(words + 15", "read_back",
    ),
    Mutation(
        "syndrome of an earlier completion", QUEUE, "cqe_tail(load_acquire(words + 15",
        "cqe_tail(load_relaxed(words + 15", "errors", seeds=1000,
    ),
    *(Mutation(
        f"what another warp saw complete taken without acquire, {scenario}", QUEUE,
        _KNOWN + _COMPLETED, _COMPLETED + _KNOWN.replace("acquire", "relaxed"), scenario,
        seeds=1000,
    ) for scenario in ("read_back", "errors")),
    Mutation(
        "completion's counter before the rest", ENGINE, _CQE_WORDS + _CQE_TAIL,
        _CQE_TAIL + _CQE_WORDS, "completions",
    ),
    Mutation(
        "completion's counter without release", ENGINE, "(tail), __ATOMIC_RELEASE);",
        "(tail), __ATOMIC_RELAXED);", "completions",
    ),
    Mutation(
        "chunk not cut at the end of the put", QUEUE,
        "        mine = chunk, mine.bytes = chunk_bytes;", "        mine = chunk;",
    ),
]
