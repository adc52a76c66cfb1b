"""Harbor jobs as a source of rollouts that may be trained on. See docs/harbor-rl.md

Harbor is imported only when a job is made; what it returns is checked by
`coldframe.learning.contracts`.
"""

from coldframe.integrations.harbor_rl.adapter import HarborRLAdapter
from coldframe.integrations.harbor_rl.frozen import tasks_of_split
from coldframe.integrations.harbor_rl.results import (
    Evaluation,
    EvaluationRecord,
    Generation,
    Group,
    Rejected,
)
from coldframe.integrations.harbor_rl.runner import Caps, JobOutcome, run_harbor_job
from coldframe.integrations.harbor_rl.specs import RLTask
from coldframe.learning.contracts import ContractError, PolicyIdentity, PolicyRollout

__all__ = [
    "Caps",
    "ContractError",
    "Evaluation",
    "EvaluationRecord",
    "Generation",
    "Group",
    "HarborRLAdapter",
    "JobOutcome",
    "PolicyIdentity",
    "PolicyRollout",
    "RLTask",
    "Rejected",
    "run_harbor_job",
    "tasks_of_split",
]
