"""Pipeline parallelism: any model cut into stages, run by torch's schedules."""

from shoal.parallel.pipeline.pipeline import Costs, Pipeline
from shoal.parallel.pipeline.schedule import schedule_name, stages_of

__all__ = ["Costs", "Pipeline", "schedule_name", "stages_of"]
