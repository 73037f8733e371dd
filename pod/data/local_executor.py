"""datatrove's executor for one machine, with processes that cannot be waited for in vain. Imports datatrove: import it late."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.utils.logging import setup_default_logger

from pod.data.workers import Count, run_tasks


class LocalExecutor(LocalPipelineExecutor):
    """Tasks, completions and log files are datatrove's, the processes are those of `pod.data.workers`.

    datatrove's own pool waits for ever for a task whose process was killed (out of memory), and its manager process outlives
    a killed parent. `description` stands before the progress bar. Raises what a task raised, and `ValueError` when a process
    was killed.
    """

    def __init__(self, *arguments: Any, description: str, **options: Any):
        super().__init__(*arguments, **options)
        self.description = description

    def run(self) -> None:
        """Run all tasks that have no completion mark yet."""
        ranks = self.get_incomplete_ranks()
        if not ranks:
            return
        self.save_executor_as_json()
        run_tasks(
            self._run_task,
            ranks,
            self.workers,
            description=self.description,
            unit="tasks",
            total=self.tasks,
            done=self.tasks - len(ranks),
        )

    def _run_task(self, rank: int, count: Count) -> None:
        # The whole traceback is in the task's log file; the console gets the one line of the error that is raised.
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                self._run_for_rank(rank)
        finally:
            setup_default_logger()
        count(1)
