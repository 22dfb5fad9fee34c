"""Before a run: where every byte lives, how long a step takes, what limits it and what to change.

    shape = resolve_shape("llama-8b")                       # preset, folder, config file or hub id; no weights
    hardware = load_hardware("rtx4070-laptop")              # or None: this machine as gds_optimizer.py measured it
    answer = choose_or_change(shape, RunRequest(), hardware)
    answer.plan.fits, answer.plan.time.step_s, answer.plan.to_dict()

Pure functions of (model shape, run settings, machine); every constant has its source in `outcore.plan.constants`. All
times are forecasts."""

from outcore.model import preset_shape, resolve_shape
from outcore.plan.choose import PlanAnswer, choose, choose_or_change
from outcore.plan.constants import RATED_WRITES_PER_BYTE
from outcore.plan.hardware import Hardware, ProfileError
from outcore.plan.inference import InferencePlan, PassTime, plan_inference, plan_of
from outcore.plan.profile import MEASURED_PROFILE, RunRequest, differs, load_hardware
from outcore.plan.record import Plan, TierUse
from outcore.sizing.shape import ModelShape
