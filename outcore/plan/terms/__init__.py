"""What the forecasts of both engines are made of: the case, its arithmetic, bytes moved, rates, spill."""
