"""What the registry's page is given; how it looks is for tests/browser."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request

import pytest
from tests.system.cluster import TOKEN, batch, cluster, model_facts

from expertwire import Registry
from expertwire.page import FILES, picture, serve_page
from expertwire.processes import ChildProcess


def get(address, path="/"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return answer.headers, answer.read().decode()


def test_three_files_from_here_and_nothing_else():
    with Registry(token=TOKEN) as registry, serve_page(registry, "127.0.0.1:0") as web:
        content = {path: get(web.address, path) for path in FILES}
    for path, (headers, body) in content.items():
        assert headers["Content-Type"].startswith(FILES[path][1]) and body
    for _, body in content.values():
        links = re.findall(r"https?://[^\s\"'`<>)]+", body)
        assert set(links) <= {"http://www.w3.org/2000/svg"}, "a name space, never loaded"
    html = content["/"][1]
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", html), "the policy bars these"
    for name in re.findall(r'\$\("([\w-]+)"\)', content["/page.js"][1]):
        assert f'id="{name}"' in html, f"the script looks for #{name}"
    assert "innerHTML" not in content["/page.js"][1]


def test_the_picture_is_what_the_registry_knows():
    model = model_facts(num_layers=2)
    with cluster([range(4), range(4, 8)], model) as (client, _, registry), \
            serve_page(registry, "127.0.0.1:0") as web:
        for seed in range(3):
            client.moe(seed % 2, *batch(6, model, seed=seed))
        deadline = time.monotonic() + 20
        while True:
            shown = json.loads(get(web.address, "/picture.json")[1])
            if sum(c["rows"] or 0 for c in shown["clients"]) and \
                    sum(c["rows"] for c in shown["clients"]) == sum(
                        s["rows"] or 0 for s in shown["servers"]):
                break
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
    assert (shown["model"], shown["num_experts"], shown["num_clients"]) == ("scaled", 8, 1)
    assert [s["experts"] for s in shown["servers"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for server in shown["servers"]:
        assert server["layer_experts"] == server["experts"] and len(server["layer_rows"]) == 2
        assert {t["stage"] for t in server["stages"]} >= {"poll", "gather", "experts", "reply"}
    (reported,) = shown["clients"]
    assert {pair["server"] for pair in reported["pairs"]} == {"s0", "s1"}
    assert all(pair["p99_us"] > 0 and pair["bytes_sent"] > 0 for pair in reported["pairs"])


def test_nothing_that_helps_to_connect_is_shown():
    with cluster([range(8)]) as (_, (server,), registry), \
            serve_page(registry, "127.0.0.1:0") as web:
        (member,) = registry.members.values()
        shown = get(web.address, "/picture.json")[1]
    facts = member.facts
    for secret in (TOKEN.decode(), facts["address"], facts["model"]["fingerprint"],
                   str(facts["pid"]), facts["host_id"]):
        assert not secret or secret not in shown, secret
    assert server.name in shown


def member(**stats):
    return {"server_id": "s", "seat": 0, "experts": [0], "draining": False, "silent_s": 0.0,
            "reports": 0, "model": {"name": "m", "num_experts": 4}, "stats": stats,
            "address": "hidden", "pid": 1}


RUBBISH = [None, 3, "x", [], {"a": {}}, True, float("nan"), float("inf"), [[1, "x", None]],
           {"\x1b[2J": {"p50_us": "x"}}]


@pytest.mark.parametrize("value", RUBBISH, ids=repr)
def test_what_processes_say_of_themselves_is_json_that_a_browser_reads(value):
    names = ("at_s", "rows", "rows_per_s", "stages", "errors", "expert_rows", "row_experts",
             "layer_rows", "layer_experts", "queue_depth", "clients")
    client = dict.fromkeys(("client", "servers", "stages", "dropped", "retries", "rows"), value)
    shown = picture({
        "epoch": 1, "uptime_s": 1.0, "reports": 0, "clients": ["c"], "client_stats": [client],
        "servers": [member(**dict.fromkeys(names, value))],
    })
    text = json.dumps(shown, allow_nan=False)
    assert "hidden" not in text and "\\u001b" not in text


def test_one_look_at_the_registry_serves_many_readers():
    with Registry(token=TOKEN) as registry, serve_page(registry, "127.0.0.1:0") as web:
        bodies = [get(web.address, "/picture.json")[1] for _ in range(5)]
        looks = len(set(bodies))  # uptime_s differs from look to look
        time.sleep(0.3)
        assert get(web.address, "/picture.json")[1] not in bodies
    assert looks <= 3


def test_a_registry_that_is_gone_is_an_error_and_not_an_old_picture():
    registry = Registry(token=TOKEN).start()
    with serve_page(registry, "127.0.0.1:0") as web:
        get(web.address, "/picture.json")
        registry.close()
        time.sleep(0.3)
        with pytest.raises(urllib.error.HTTPError) as failed:
            get(web.address, "/picture.json")
    assert failed.value.code == 503


def test_the_commands_page_says_where_it_is_and_ends_with_it():
    env = {"EXPERTWIRE_TOKEN": TOKEN.decode()}
    registry = ChildProcess("registry", ["registry", "--listen", "127.0.0.1:0",
                                         "--page-port", "0"], env=env)
    try:
        address = registry.wait_line("page at http://", 60).split("/")[2]
        assert address.startswith("127.0.0.1:")
        assert json.loads(get(address, "/picture.json")[1])["servers"] == []
    finally:
        code = registry.stop()
    assert code in (0, 143)
    with pytest.raises(OSError):
        get(address)
