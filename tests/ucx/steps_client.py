"""A client on another host: steps without a pause until its input ends, every result checked.

    python tests/ucx/steps_client.py REGISTRY NUM_SERVERS

Says "connected", then one line per change of who serves, then what happened as JSON.
"""

from __future__ import annotations

import json
import select
import sys

from expertwire import Client
from tests.system.test_failover import Load


def main() -> None:
    registry, num_servers = sys.argv[1], int(sys.argv[2])
    load, times, serving = Load(), [], None
    with Client(registry, hca="ucx", connect_timeout=30.0) as client:
        table = client.links.wait(lambda t: len(t.links) == num_servers, 60)
        assert len(table.links) == num_servers, client.links.refusals
        print("connected", flush=True)
        while not select.select([0], [], [], 0)[0]:
            times.append(load.step(client, len(times) % 4))
            now = sorted(link.server_id for link in client.links.usable().links)
            if now != serving:
                serving = now
                print("serving", ",".join(serving), flush=True)
        stats = client.stats()
    print(json.dumps({"steps": len(times), "longest": max(times), "retries": stats["retries"]}),
          flush=True)


if __name__ == "__main__":
    main()
