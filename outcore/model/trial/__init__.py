"""Abilities of a model, found out on a tiny copy of it."""

from outcore.model.trial.abilities import (
    DOCUMENTS,
    MAX_TRIAL_PARAMS,
    TOLERANCE,
    Abilities,
    builder_of,
    check_abilities,
    freeze,
    on_one_thread,
    run_once,
)
from outcore.model.trial.loss_terms import USUAL_TERMS, LossTerms, aux_coefficient, mean_cross_entropy
from outcore.model.trial.shrink import VOCAB, check_token_ids, embedding_rows, shrink_config
