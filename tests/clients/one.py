"""Make every call of one client, in that client's environment, and print what became of each as JSON.

python one.py CLIENT BASE_URL MODEL TOKENIZER [CALL ...]
"""

import importlib
import json
import sys
import time
import traceback

from calls.shared import CALLS, Server


def main() -> None:
    client, *rest = sys.argv[1:]
    server, wanted = Server(*rest[:3]), rest[3:] or list(CALLS)
    calls = importlib.import_module(f"calls.{client}")
    for name in wanted:
        began = time.perf_counter()
        if name in calls.LACKS:
            said = {"call": name, "lacks": calls.LACKS[name]}
        else:
            try:
                getattr(calls, name)(server)
                said = {"call": name, "ok": True}
            except Exception as error:
                traceback.print_exc()
                said = {"call": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        print("CALL", json.dumps(said | {"seconds": round(time.perf_counter() - began, 2)}), flush=True)


if __name__ == "__main__":
    main()
