"""All tasks by name."""

from lineate.tasks.memory import MEMORY_TASKS
from lineate.tasks.streams import STREAM_TASKS
from lineate.tasks.task import Task
from lineate.tasks.tracking import TRACKING_TASKS

TASKS: dict[str, Task] = {task.name: task for task in MEMORY_TASKS + STREAM_TASKS + TRACKING_TASKS}
