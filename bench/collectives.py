"""Runs `paceline collectives` on namespace hosts with limited links. Requires root.

    python bench/collectives.py [--hosts 2,3,4] [--mbit 100] [--save]

The hosts are network namespaces with their own SSH servers, as in the tests; `tc` limits both
directions of every link. The burst is small, so that messages above 100 kB have the rate. With
other programs on the machine, run it with priority (`nice -n -19`). Prints
the tables of docs/collectives.md and fails if a formula is wrong by more than 25%.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network_namespaces import Lab, make_lab, run
from results_store import keep

BURST, QUEUE = "5kb", "200ms"
LARGE_BYTES, LIMIT = 100_000, 0.25
TIMEOUT_S = 900


def limit_links(lab: Lab, mbit: int) -> None:
    """Limits what each host sends, and what the bridge sends to it."""
    for machine in lab.machines:
        limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE)
        run("tc", "-n", machine.namespace, "qdisc", "add", "dev", "eth0", *limit)
        run("tc", "qdisc", "add", "dev", f"{machine.namespace}v0", *limit)


def measure(hosts: int, mbit: int) -> dict[str, Any]:
    """Returns collectives.json of the given number of hosts."""
    with tempfile.TemporaryDirectory() as name, make_lab(Path(name), hosts) as lab:
        limit_links(lab, mbit)
        pool = lab.write_pool(lab.folder / "pool.yaml", all={"python": sys.executable})
        out = lab.folder / "out"
        command = [sys.executable, "-m", "paceline", "collectives", "--pool", pool, "--write"]
        done = subprocess.run(
            [*map(str, command), "--out", str(out)],
            env={**os.environ, "HOME": str(lab.home)},
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"paceline collectives ended with status {done.returncode}")
        body: dict[str, Any] = json.loads((out / "collectives.json").read_text())
        return body


def print_markdown(body: dict[str, Any], hosts: int) -> None:
    """Prints measured / formula of the collectives in which all hosts take part."""
    rows = [row for row in body["rows"] if row["workers"] == hosts]
    sizes = sorted({row["nbytes"] for row in rows})
    print("| collective | " + " | ".join(f"{size:,} bytes" for size in sizes) + " |")
    print("|---|" + "---:|" * len(sizes))
    for name in dict.fromkeys(row["collective"] for row in rows):
        same = {row["nbytes"]: row for row in rows if row["collective"] == name}
        cells = [f"{1e3 * same[s]['seconds']:.1f} ({same[s]['ratio']:.2f})" for s in sizes]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="2,3,4")
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    found = {hosts: measure(hosts, given.mbit) for hosts in map(int, given.hosts.split(","))}
    worst = 0.0
    for hosts, body in found.items():
        print(f"\n{hosts} hosts, {given.mbit} Mbit/s; milliseconds (measured / formula)\n")
        print_markdown(body, hosts)
        errors = [abs(r["ratio"] - 1) for r in body["rows"] if r["nbytes"] >= LARGE_BYTES]
        worst = max(worst, *errors)
        print(
            f"\nfit: {1e3 * body['latency_s']:.3f} ms, {body['bytes_per_s'] * 8 / 1e6:.1f} Mbit/s; "
            f"largest error from 100 kB: {max(errors):.0%}"
        )
    if given.save:
        keep("collectives", {"mbit_s": given.mbit, "by_hosts": found})
    if worst > LIMIT:
        raise SystemExit(f"a formula is wrong by {worst:.0%}")


if __name__ == "__main__":
    main()
