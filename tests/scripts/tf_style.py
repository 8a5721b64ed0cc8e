"""Imitates a TensorFlow program that is configured by TF_CONFIG only, without TensorFlow.

A ps stores a number and never exits. Workers add to it. The chief waits until all workers
have added, and prints the sum. An evaluator looks at the cluster and leaves.
"""

import json
import os
import socket
import time

config = json.loads(os.environ["TF_CONFIG"])
cluster, task = config["cluster"], config["task"]


def split(address):
    host, port = address.rsplit(":", 1)
    return host, int(port)


def ask(word):
    deadline = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(split(cluster["ps"][0]), timeout=5) as connection:
                connection.sendall(word.encode() + b"\n")
                return int(connection.makefile().readline())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if task["type"] == "ps":
    total = adds = 0
    listener = socket.create_server(split(cluster["ps"][task["index"]]))
    print("serving", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            word = connection.makefile().readline().strip()
            if word != "sum":
                total, adds = total + int(word), adds + 1
            done = adds == len(cluster["worker"])
            connection.sendall(b"%d\n" % (total if done or word != "sum" else -1))
elif task["type"] == "worker":
    ask(str(10 ** task["index"]))
elif task["type"] == "chief":
    while ask("sum") < 0:
        time.sleep(0.05)
    print("sum", ask("sum"))
else:
    assert "evaluator" not in cluster
    print("evaluator sees", sorted(cluster))
