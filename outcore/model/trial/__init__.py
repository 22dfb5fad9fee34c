"""What a model can do, found out on a tiny copy of it."""

from outcore.model.trial.abilities import (
    MAX_TRIAL_PARAMS,
    Abilities,
    builder_of,
    check_abilities,
    on_one_thread,
    run_once,
)
from outcore.model.trial.shrink import VOCAB, shrink_config
from outcore.model.trial.vocabulary import check_token_ids, embedding_rows
