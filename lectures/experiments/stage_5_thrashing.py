"""Four requests in a pool for one and a half of them, in larger ones, and in static batches: the work done twice."""

from dataclasses import replace

from tools.scheduler_page.build import scenes
from tools.scheduler_page.play import Setup, play

thrashing = Setup.parse(next(scene for scene in scenes() if scene["name"] == "thrashing"))
print("blocks     steps preempted computed again")
for num_blocks, static in ((12, False), (16, False), (24, False), (32, False), (12, True)):
    run = play(replace(thrashing, num_blocks=num_blocks, static=static))
    computed = sum(share[1] for frame in run["frames"] for share in frame["shares"].values())
    name = f"{num_blocks}{', static' if static else ''}"
    steps, preempted, again = (run["totals"][key] for key in ("steps", "preemptions", "again"))
    print(f"{name:10}{steps:6}{preempted:10}{computed:9}{again:6}")
