"""pure-ldp in its own process: reads one task per line, answers with its seconds.

Run by the interpreter of `.venv-peers`; it imports nothing of ours.
"""

import json
import sys
import time

from pure_ldp.frequency_oracles.apple_cms import CMSClient, CMSServer

prepared = {}


def prepare(kind, epsilon, rows, width, records):
    """A server, a client and privatised records, which are cached."""
    key = (kind, epsilon, rows, width)
    if key not in prepared:
        server = CMSServer(epsilon, rows, width, is_hadamard=kind == "hcms")
        client = CMSClient(epsilon, server.get_hash_funcs(), width, is_hadamard=kind == "hcms")
        prepared[key] = (server, client, [client.privatise(item % 1000) for item in range(records)])
    return prepared[key]


def run(task):
    server, client, records = prepare(*task["oracle"], task["records"])
    started = time.process_time()
    if task["step"] == "device":
        for item in range(task["records"]):
            client.privatise(item % 1000)
    elif task["step"] == "fold":
        for record in records:
            server.aggregate(record)
    else:
        for item in range(task["items"]):
            server.estimate(item, suppress_warnings=True)
    return time.process_time() - started


for request in sys.stdin:
    print(json.dumps(run(json.loads(request))), flush=True)
