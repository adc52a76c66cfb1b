"""Ask the service that the sandbox began with what it has seen; only root could have opened its audit port."""

import json
import os
import pathlib
import urllib.request

SETTLED = "/home/clerk/settled.json"
AUDIT = "http://127.0.0.1:860/"


def settled():
    if os.path.islink(SETTLED) or not os.path.isfile(SETTLED) or os.path.getsize(SETTLED) > 1 << 20:
        return None
    try:
        return json.loads(pathlib.Path(SETTLED).read_bytes())
    except (ValueError, RecursionError):
        return None


def check():
    with urllib.request.urlopen(AUDIT, timeout=20) as answer:
        seen = json.load(answer)
    wanted = {order["id"]: order for order in seen["orders"] if not order.get("cancelled")}
    moves = {move["move"]: move for move in seen["moves"]}
    said = settled()
    if len(moves) != len(wanted):
        return f"{len(moves)} moves were made for {len(wanted)} orders"
    if not isinstance(said, dict):
        return f"{SETTLED} is no JSON object"
    if set(said) != set(wanted):
        return f"{SETTLED} names other orders: {sorted(set(said) ^ set(wanted))[:5]}"
    if sorted(map(str, said.values())) != sorted(moves):
        return f"{SETTLED} names other moves than were made, or one twice"
    for order, move in said.items():
        made, right = moves[move], wanted[order]
        if (made["item"], made["count"]) != (right["item"], right["count"]):
            return f"{order} is {right['count']} {right['item']}, but {move} is {made['count']} {made['item']}"
    return None


def main():
    problem = check()
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()
