"""Builds a project's models from many caches, one process for each; for `test_hostile_cache.py`.

`python hostile_runner.py PROJECT CLEAN CASES` reads the names of folders from the file CASES. Each has a cache in
`a/b/cache`; what came of it is written to `outcome.json` there. CLEAN is a sound cache that has everything: where a
build would export and compile, the finished artifact is taken from there, since what is tested is what the cache makes
of what it finds, some hundred times.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from hatch_aoti.artifact.cache import Cache, file_digest, open_cache
from hatch_aoti.build import pipeline
from hatch_aoti.build.progress import Reporter
from hatch_aoti.build.workers import Job, Outcome
from hatch_aoti.codec import unpack
from hatch_aoti.errors import AotiError
from hatch_aoti.job.values import ModelJob
from hatch_aoti.plugin.project import build_project, open_project

SUMS = "SHA256SUMS.json"
PATIENCE = 120  # seconds; not what is tested, only an end to waiting for a FIFO


def results_in(clean: Path) -> dict[str, dict[str, Any]]:
    """Return what the workers said at the build that filled the clean cache, by model."""
    notes = [json.loads(path.read_bytes().partition(b"\n")[2])[0] for path in clean.glob("notes/*/*.json")]
    return {note["value"]["name"]: note for note in notes}


def finished_jobs(clean: Path, remade: list[str]):
    """Return a function that stands in for `run_jobs`, and notes which entries it had to make."""
    results = results_in(clean)

    def make(job: Job) -> Outcome:
        cache, result = Cache(unpack(ModelJob, job.payload).cache), results[job.name]["value"]
        for artifact in result["artifacts"]:
            with cache.lock(artifact["key"]):
                if cache.get(artifact["key"]) is None:
                    remade.append(job.name)
                    with cache.scratch("artifact") as directory:
                        entry = clean / "artifacts" / artifact["key"][:2] / artifact["key"]
                        shutil.copytree(entry, directory / "entry", ignore=shutil.ignore_patterns(SUMS))
                        cache.put(artifact["key"], directory / "entry")
            place = cache.place(artifact["key"])
            artifact["path"] = str(place / Path(artifact["path"]).name)
            artifact["constants"] = artifact["constants"] and str(place / Path(artifact["constants"]).name)
        return Outcome(job, {"codec": results[job.name]["codec"], "value": {"result": result}}, 0, "done")

    return lambda jobs, **_: [make(job) for job in jobs]


def use(project, clean: Path, directory: Path) -> dict[str, Any]:
    """Build with a cache, see whether its headers are believed, and empty it; return what came of it."""
    remade: list[str] = []
    pipeline.run_jobs = finished_jobs(clean, remade)
    cache = open_cache(directory)
    contents = build_project(project, cache, Reporter(), environ=os.environ)[0].contents
    wheel = {name: file_digest(path) for name, path in contents.artifacts.items()} | dict(contents.texts)
    headers = {}
    for entry in sorted(clean.glob("headers/*/*")):
        found = cache.get(entry.name, "headers")
        if found is not None:
            files = [path for path in sorted(found.iterdir()) if path.name != SUMS]
            headers[entry.name] = {path.name: path.read_text(encoding="utf-8") for path in files}
    digest = cache.keyed_digest(b"")
    for path in directory.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    trimmed, cleared = cache.trim(0), cache.clear()
    return {"wheel": wheel, "headers": headers, "remade": remade, "digest": digest, "freed": trimmed + cleared}


def main(root: Path, clean: Path, cases: Path) -> None:
    project = open_project(root, environ=os.environ)
    first, *others = map(Path, json.loads(cases.read_text(encoding="utf-8")))
    use(project, clean, first / "a" / "b" / "cache")  # imports what the others need
    for case in others:
        process = os.fork()
        if process == 0:
            signal.alarm(PATIENCE)
            try:
                said = use(project, clean, case / "a" / "b" / "cache")
            except AotiError as error:
                said = {"refused": str(error)}
            except BaseException:  # noqa: BLE001 - whatever else there is must be seen
                said = {"traceback": traceback.format_exc()}
            (case / "outcome.json").write_text(json.dumps(said), encoding="utf-8")
            os._exit(0)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
