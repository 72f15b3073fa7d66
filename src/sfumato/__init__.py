"""Private federated analytics and learning.

Ask a fleet of devices a question and get an answer with error bars, a privacy statement that is
true, and a bill. `plan(study)` sizes the question, `simulate(plan, data)` answers it for simulated
devices; the parts are in `sfumato.sketch`, `sfumato.privacy` and the modules of the flow.
"""

from sfumato.errors import SfumatoError
from sfumato.plan import Plan, plan
from sfumato.release import Release
from sfumato.simulate import simulate
from sfumato.study import Study

__all__ = ["Plan", "Release", "SfumatoError", "Study", "plan", "simulate"]
__version__ = "0.1.0"
