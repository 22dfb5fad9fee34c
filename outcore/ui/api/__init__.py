"""The routes behind the panels: runs, training, forecasts, data, folders, a loaded model, conversations, the machine.

They stand under /v1 beside the model's own (`passing`) and those of evaluations; JSON in and out, errors in one shape.
"""

from outcore.ui.api.estimate import warm_up
from outcore.ui.api.form import table
from outcore.ui.api.place import Place
from outcore.ui.api.routes import PanelsApi
