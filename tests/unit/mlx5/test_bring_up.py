"""What is asked of verbs and firmware from open to RTS: order, attributes, nothing hard-coded."""

from __future__ import annotations

import ctypes
import ipaddress

import pytest
from tests.mlx5_fake import FakeCaps, FakePort, connected

from expertwire.errors import ConfigError
from expertwire.hca.mlx5 import prm
from expertwire.hca.mlx5.path import udp_port

V4 = "::ffff:10.0.0.{}"


def roce(number: int, *, mtu: int = 3, gids=None) -> FakePort:
    return FakePort(link_layer=2, lid=0, active_mtu=mtu, pkeys=(0xFFFF,),
                    gids=gids or ((3, 2, V4.format(number)),))


def states(device) -> list[dict]:
    """RST2INIT, INIT2RTR, RTR2RTS as they were asked."""
    return [device.command(opcode)[0] for opcode in (0x502, 0x503, 0x504)]


def test_queue_pair_is_made_of_zeroed_structures_and_queried_values(opened):
    device, hca = opened()
    qp = hca.create_qp(128)
    (cq,), (made,) = device.command(0x400), device.command(0x500)
    assert cq["sw_cqc"] == {
        "cc": 1, "oi": 1, "log_cq_size": 7, "c_eqn": 0x2A, "uar_page": 0x60,
        "dbr_umem_valid": 1, "dbr_umem_id": cq["sw_cqc"]["dbr_umem_id"]}
    assert made["sw_qpc"] == {
        "pm_state": prm.PM_MIGRATED, "pd": 0x77, "log_sq_size": 7, "uar_page": 0x60,
        "cqn_snd": 0x500, "cqn_rcv": 0x500, "rq_type": 3, "dbr_umem_valid": 1,
        "dbr_umem_id": made["sw_qpc"]["dbr_umem_id"]}
    umems = {u: facts for u, facts in zip(device.umems, device.asked("UMEM"), strict=True)}
    assert umems[made["wq_umem_id"]]["addr"] == qp.info.sq_addr
    assert umems[cq["cq_umem_id"]]["addr"] == qp.info.cq_addr
    assert umems[made["sw_qpc"]["dbr_umem_id"]]["addr"] == qp.info.dbrec_addr
    assert umems[cq["sw_cqc"]["dbr_umem_id"]]["addr"] == qp.info.cq_dbrec_addr
    assert all(facts["access"] == 1 and not facts["comp_mask"] for facts in umems.values())
    assert qp.info.uar_addr + 0x800 == device.uars[0x60].reg_addr
    assert ctypes.string_at(qp.info.cq_addr, 64 * 128) == b"\xff" * 64 * 128
    assert qp.query_state() == 0


def test_infiniband_path(opened):
    a, here = opened(FakePort(lid=0x11, active_mtu=5))
    b, there = opened(FakePort(lid=0x22, active_mtu=5))
    qps = connected(here, there)
    init, rtr, rts = states(a)
    assert init["sw_qpc"] == {
        "pm_state": 3, "rre": 1, "rwe": 1, "rae": 1, "atomic_mode": 3,
        "primary_address_path": {"vhca_port_num": 1}}
    assert rtr["sw_qpc"] == {
        "mtu": 5, "log_msg_max": 30, "remote_qpn": qps[1].info.qpn, "min_rnr_nak": 12,
        "log_rra_max": 4, "next_rcv_psn": states(b)[2]["sw_qpc"]["next_send_psn"],
        "primary_address_path": {"rlid": 0x22, "vhca_port_num": 1}}
    assert rts["sw_qpc"] == {
        "retry_count": 7, "rnr_retry": 7, "log_sra_max": 4,
        "next_send_psn": states(b)[1]["sw_qpc"]["next_rcv_psn"],
        "primary_address_path": {"ack_timeout": 20, "vhca_port_num": 1}}
    assert all(qp.query_state() == 3 for qp in qps)
    assert not a.asked("ah")  # an InfiniBand packet has no Ethernet address


def test_packet_numbers_are_random_per_end(opened):
    _, here = opened()
    psns = {here.create_window().psn for _ in range(20)}
    assert len(psns) == 20 and all(0 <= psn < 1 << 24 for psn in psns)


@pytest.mark.parametrize("ours, theirs, limit, expected", [
    (5, 5, None, 5), (5, 3, None, 3), (3, 5, None, 3), (1, 4, None, 1), (5, 5, 2048, 4),
    (3, 5, 4096, 3)])
def test_mtu_is_the_smaller_of_both_ports_on_both_sides(opened, ours, theirs, limit, expected):
    a, here = opened(FakePort(lid=1, active_mtu=ours), mtu=limit)
    b, there = opened(FakePort(lid=2, active_mtu=theirs))
    connected(here, there)
    assert [states(d)[1]["sw_qpc"]["mtu"] for d in (a, b)] == [expected, expected]


def test_every_operators_choice_arrives_on_infiniband(opened):
    a, here = opened(
        FakePort(), FakePort(lid=0x20, lmc=2, pkeys=(0xFFFF, 0, 0x8123)), port=2, pkey=0x8123,
        sl=9, path_bits=3, ack_timeout=14, retry_count=5, rnr_retry=3, min_rnr_timer=6,
        max_rd_atomic=4)
    b, there = opened(FakePort(lid=0x40, pkeys=(0x8123,)), pkey=0x123)
    connected(here, there)
    init, rtr, rts = (s["sw_qpc"] for s in states(a))
    assert init["primary_address_path"] == {"vhca_port_num": 2, "pkey_index": 2}
    assert rtr["primary_address_path"] == {
        "vhca_port_num": 2, "pkey_index": 2, "rlid": 0x40, "mlid": 3, "sl": 9}
    assert (rtr["min_rnr_nak"], rtr["log_rra_max"]) == (6, 2)
    assert (rts["retry_count"], rts["rnr_retry"], rts["log_sra_max"]) == (5, 3, 2)
    assert rts["primary_address_path"] == {"vhca_port_num": 2, "ack_timeout": 14}
    # The other end: replies go to the LID with the path bits, reads are what we answer.
    _, rtr, rts = (s["sw_qpc"] for s in states(b))
    assert rtr["primary_address_path"]["rlid"] == 0x23 and rts["log_sra_max"] == 2


def test_infiniband_between_subnets_has_a_route_header(opened):
    a, here = opened(FakePort(lid=1, gids=((0, 0, "fec0:0:0:1::11"),)), traffic_class=0x20,
                     hop_limit=9, flow_label=0x54321)
    _, there = opened(FakePort(lid=2, gids=((0, 0, "fec0:0:0:2::22"),)))
    connected(here, there)
    assert states(a)[1]["sw_qpc"]["primary_address_path"] == {
        "vhca_port_num": 1, "rlid": 2, "grh": 1, "hop_limit": 9, "tclass": 0x20,
        "flow_label": 0x54321, "rgid_rip": int(ipaddress.IPv6Address("fec0:0:0:2::22"))}


def test_port_that_demands_a_route_header_gets_one_in_its_own_subnet(opened):
    a, here = opened(FakePort(lid=0, flags=1))
    _, there = opened(FakePort(lid=2, gids=((0, 0, "fe80::22"),)))
    fields = here.create_qp(64)
    window = there.create_window()
    fields.connect(here.connect_peer(here.create_window(), window.wire), 5)
    assert states(a)[1]["sw_qpc"]["primary_address_path"]["grh"] == 1


def test_roce_v2_path(opened):
    a, here = opened(roce(1, mtu=5), traffic_class=106, sl=3, hop_limit=64)
    _, there = opened(roce(2, mtu=3))
    a.macs[ipaddress.IPv6Address(V4.format(2)).packed] = bytes.fromhex("0c42a1000102")
    qps = connected(here, there)
    sport = udp_port(qps[0].info.qpn, qps[1].info.qpn)
    assert states(a)[1]["sw_qpc"]["primary_address_path"] == {
        "vhca_port_num": 1, "src_addr_index": 3, "hop_limit": 64, "tclass": 106,
        "rgid_rip": int(ipaddress.IPv6Address(V4.format(2))), "rmac": 0x0C42A1000102,
        "eth_prio": 3, "dscp": 26, "udp_sport": sport}
    assert states(a)[1]["sw_qpc"]["mtu"] == 3
    assert 0xC000 <= sport <= 0xFFFF
    (asked,) = a.asked("ah")  # the kernel resolved the next hop with the same attributes
    assert asked == dict(
        pd=0xAD0, dgid=ipaddress.IPv6Address(V4.format(2)).packed, sgid_index=3, port=1,
        hop_limit=64, traffic_class=106, flow_label=0, sl=3)


def test_roce_v1_has_no_udp_port_and_no_dscp(opened):
    a, here = opened(roce(1, gids=((0, 1, "fe80::1"),)), traffic_class=106)
    _, there = opened(roce(2, gids=((0, 1, "fe80::2"),)))
    connected(here, there)
    path = states(a)[1]["sw_qpc"]["primary_address_path"]
    assert {"udp_sport", "dscp", "rlid", "mlid", "sl", "grh"}.isdisjoint(path)
    assert path["rgid_rip"] == int(ipaddress.IPv6Address("fe80::2"))


def test_udp_ports_spread_and_both_ends_agree():
    ports = {udp_port(qpn, qpn + 1000) for qpn in range(256, 512)}
    assert len(ports) > 200
    assert udp_port(300, 900) == udp_port(900, 300)


def test_firmware_limits_bound_what_is_asked(opened):
    caps = FakeCaps()
    caps.general |= dict(log_max_msg=28, log_max_ra_req_qp=1, log_max_ra_res_qp=3, sq_ts_format=2)
    a, here = opened(caps=caps)
    _, there = opened(FakePort(lid=2))
    connected(here, there)
    _, rtr, rts = (s["sw_qpc"] for s in states(a))
    assert (rtr["log_msg_max"], rtr["log_rra_max"], rts["log_sra_max"]) == (28, 3, 1)
    assert a.command(0x500)[0]["sw_qpc"]["ts_format"] == 1


def test_timestamp_format_of_a_roce_adapter_is_the_roce_capability(opened):
    caps = FakeCaps(roce=dict(qp_ts_format=1))
    caps.general |= dict(roce=1, port_type=1)
    device, hca = opened(roce(1), caps=caps)
    hca.create_qp(64)
    assert device.command(0x500)[0]["sw_qpc"]["ts_format"] == 1


@pytest.mark.parametrize("depth", [8, 48, 100, 65536, 0])
def test_depth_that_the_adapter_does_not_have(opened, depth):
    _, hca = opened()
    with pytest.raises(ConfigError, match="power of two"):
        hca.create_qp(depth)


def test_firmwares_own_limit_of_the_depth(opened):
    caps = FakeCaps()
    caps.general |= dict(log_max_qp_sz=8)
    _, hca = opened(caps=caps)
    hca.create_qp(256)
    with pytest.raises(ConfigError, match="16 to 256"):
        hca.create_qp(512)


def test_things_are_given_back_in_the_reverse_order(opened):
    device, hca = opened()
    qp = hca.create_qp(64)
    device.calls.clear()
    qp.destroy()
    names = [call.removeprefix("close ") for call, _ in device.calls]
    assert names == ["Mlx5DevxObj", "Mlx5UMEM", "Mlx5UMEM", "Mlx5DevxObj", "Mlx5UMEM", "Mlx5UMEM",
                     "Mlx5UAR"]
    qp.destroy()  # once more does nothing
    device.calls.clear()
    hca.close()
    assert [call for call, _ in device.calls] == ["close PD", "close Mlx5Context"]


def test_lost_peer_puts_its_queues_in_the_error_state(opened):
    device, here = opened()
    _, there = opened(FakePort(lid=2))
    window = there.create_window()
    peer = here.connect_peer(here.create_window(), window.wire)
    qps = [here.create_qp(64) for _ in range(2)]
    for qp in qps:
        qp.connect(peer, there.create_qp(64).info.qpn)
    other = here.create_qp(64)
    peer.lost()
    peer.lost()
    assert [qp.query_state() for qp in qps] == [6, 6] and other.query_state() == 0
    assert len(device.command(0x507)) == 2
