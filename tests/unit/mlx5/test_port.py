"""Which GID, which partition, which link layer: from the port's tables, or refused by name."""

from __future__ import annotations

import dataclasses

import pytest
from tests.mlx5_fake import FakePort

from expertwire.errors import ConfigError, HandleError
from expertwire.hca.mlx5.address import Address, check_link
from expertwire.hca.mlx5.config import Mlx5Config
from expertwire.hca.mlx5.device import ETHERNET, INFINIBAND, Gid, choose_gid
from expertwire.hca.mlx5.errors import LinkMismatch

V4, V4_MAPPED = "10.0.0.1", "::ffff:10.0.0.1"
LINK_LOCAL, GLOBAL = "fe80::1", "fd00::1"


def gid(index: int, kind: int, address: str) -> Gid:
    import ipaddress

    return Gid(index, kind, ipaddress.IPv6Address(address).packed)


@pytest.mark.parametrize("table, index", [
    ([(0, 1, LINK_LOCAL), (1, 2, LINK_LOCAL), (2, 1, V4_MAPPED), (3, 2, V4_MAPPED)], 3),
    ([(0, 1, LINK_LOCAL), (1, 2, LINK_LOCAL)], 1),
    ([(0, 2, LINK_LOCAL), (4, 2, GLOBAL)], 4),
    ([(0, 2, GLOBAL), (5, 2, V4_MAPPED), (3, 2, "::ffff:10.9.0.1")], 3),
    ([(0, 1, LINK_LOCAL), (2, 1, V4_MAPPED)], 2),
])
def test_gid_of_a_roce_port(table, index):
    assert choose_gid([gid(*row) for row in table], ETHERNET, None, "port").index == index


def test_gid_of_an_infiniband_port_is_the_first_and_a_named_one_is_taken():
    gids = [gid(0, 0, LINK_LOCAL), gid(1, 0, GLOBAL)]
    assert choose_gid(gids, INFINIBAND, None, "port").index == 0
    assert choose_gid(gids, INFINIBAND, 1, "port").index == 1


def test_a_gid_index_that_is_not_there_shows_those_that_are():
    with pytest.raises(LinkMismatch, match=rf"no GID index 7; it has 3: RoCE v2 {V4}"):
        choose_gid([gid(3, 2, V4_MAPPED)], ETHERNET, 7, "port 1 of mlx5_0")
    with pytest.raises(LinkMismatch, match="give its network interface an address"):
        choose_gid([], ETHERNET, None, "port 1 of mlx5_0")


def test_gids_of_another_port_are_not_taken(opened):
    _, hca = opened(
        FakePort(link_layer=2, gids=((0, 2, V4_MAPPED),)),
        FakePort(link_layer=2, gids=((1, 2, LINK_LOCAL),)), port=2)
    assert hca.device.port.gid.index == 1 and hca.device.port.number == 2


@pytest.mark.parametrize("table, wanted, index", [
    ((0xFFFF,), None, 0), ((0x8001, 0xFFFF), None, 1), ((0x7FFF, 0xFFFF), None, 1),
    ((0x7FFF,), None, 0), ((0xFFFF, 0, 0x8001), 0x8001, 2), ((0xFFFF, 0x8001), 0x1, 1)])
def test_partition_index_is_looked_up(opened, table, wanted, index):
    _, hca = opened(FakePort(pkeys=table), pkey=wanted)
    assert hca.device.port.pkey_index == index


def test_partition_that_the_port_is_not_in(opened, fabric):
    with pytest.raises(LinkMismatch, match=r"not in partition 0x0123; its keys: 0xffff"):
        opened(FakePort(pkeys=(0xFFFF, 0)), pkey=0x8123)
    assert not fabric.devices[0].open


def test_path_bits_beyond_the_lmc(opened):
    with pytest.raises(ConfigError, match="LMC 1, so below 2"):
        opened(FakePort(lmc=1), path_bits=2)
    with pytest.raises(ConfigError, match="for InfiniBand"):
        opened(FakePort(link_layer=2), path_bits=1)


def test_priority_beyond_what_ethernet_has(opened):
    with pytest.raises(ConfigError, match="from 0 to 7"):
        opened(FakePort(link_layer=2), sl=8)


def address(**changes) -> Address:
    base = Address(INFINIBAND, 0, 5, 0x1234, 4, 0xABCDEF, bytes(range(16)))
    return dataclasses.replace(base, **changes)


def test_address_survives_the_trip_and_is_28_bytes():
    assert Address.unpack(address().pack()) == address()
    assert address().pack() == bytes.fromhex("0101000534120400efcdab00") + bytes(range(16))


@pytest.mark.parametrize("raw, words", [
    (b"", "28 bytes"), (address().pack()[:-1], "28 bytes"),
    (b"\x02" + address().pack()[1:], "version 2"),
    (b"\x01\x03" + address().pack()[2:], "impossible"),
    (address(mtu=0).pack(), "impossible"), (address(mtu=6).pack(), "impossible"),
    (address(log_reads=8).pack(), "impossible"), (address(psn=1 << 24).pack(), "impossible"),
    (address(gid_kind=3).pack(), "impossible")])
def test_address_that_no_peer_sends_is_refused(raw, words):
    with pytest.raises(HandleError, match=words):
        Address.unpack(raw)


def test_ends_that_cannot_talk(opened):
    _, ib = opened(FakePort())
    _, v2 = opened(FakePort(link_layer=2, gids=((3, 2, V4_MAPPED),)))
    _, v1 = opened(FakePort(link_layer=2, gids=((0, 1, LINK_LOCAL),)))
    for here, there, words in ((ib, v2, "this port is InfiniBand, the peer's Ethernet"),
                               (v2, v1, "RoCE v2 .*, the peer RoCE v1"),
                               (v1, v2, "EXPERTWIRE_MLX5_GID_INDEX")):
        with pytest.raises(LinkMismatch, match=words):
            here.connect_peer(here.create_window(), there.create_window().wire)
    check_link(v2.device.port, Address.unpack(v2.create_window().wire.address))


def test_settings_come_from_the_environment_and_arguments_win():
    found = Mlx5Config.read({"EXPERTWIRE_MLX5_GID_INDEX": "3", "EXPERTWIRE_MLX5_PKEY": "0x8001",
                             "EXPERTWIRE_MLX5_ORDERED_PATH": "1", "EXPERTWIRE_MLX5_SL": "2"}, sl=5)
    assert (found.gid_index, found.pkey, found.ordered_path, found.sl) == (3, 0x8001, True, 5)
    assert Mlx5Config.read({}) == Mlx5Config()


@pytest.mark.parametrize("environment, options, words", [
    ({"EXPERTWIRE_MLX5_SL": "high"}, {}, "EXPERTWIRE_MLX5_SL is a number"),
    ({}, {"sl": 16}, "sl must be from 0 to 15"), ({}, {"mtu": 1500}, "256, 512, 1024"),
    ({}, {"gid": 3}, "no option gid; it has ack_timeout"), ({}, {"port": 0}, "port must be"),
    ({}, {"retry_count": 8}, "retry_count"), ({}, {"pkey": 0x10000}, "pkey"),
    ({"EXPERTWIRE_MLX5_ACK_TIMEOUT": "32"}, {}, "ack_timeout must be from 0 to 31")])
def test_settings_that_do_not_fit(environment, options, words):
    with pytest.raises(ConfigError, match=words):
        Mlx5Config.read(environment, **options)
