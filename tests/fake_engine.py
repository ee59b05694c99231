"""Stands in for an engine of the race: generates "tokens" for 200 ms and writes down when it began and was over.

Like that of a real engine, the process is there for a while after that.
"""

import time
from typing import Any


def work(channel: Any, job: dict[str, Any]) -> None:
    if job["engine"] == "stage_3":
        channel.send({"failed": "ValueError: no room for a KV block"})
        return
    if job["engine"] == "stage_4":
        return
    channel.send({"ready": True})
    channel.recv()
    start = time.time()
    wanted = job["workload"]["max_tokens"]
    events = []
    for i, n in enumerate(wanted):
        time.sleep(0.2 / len(wanted))
        t = time.time() - start
        ids = [7 if job["engine"] != "stage_5" else i] * n
        events.append({"t": t, "step": i, "type": "token", "request": i, "ids": ids})
        events.append({"t": t, "step": i, "type": "finished", "request": i})
        channel.send({"at": [t, sum(wanted[: i + 1]), i + 1]})
    outputs = [event["ids"] for event in events if event["type"] == "token"]
    machine = {"device": "cpu", "processor": "none", "clock": job["clock"], "began": start, "ended": time.time()}
    result = {"seconds": time.time() - start, "outputs": outputs, "events": events, "machine": machine}
    channel.send({"result": result})
    time.sleep(60)
