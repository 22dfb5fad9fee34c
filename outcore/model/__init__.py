"""The model room: where a model comes from, how it is made ready, and its loss; used by both engines.

settings = ModelSettings(preset="tiny")
loaded = load_model(settings, tokenizer=tokenizer)     # zero3_config=... : partitioned while it is made
loss = loaded.token_loss()
part = loss(loaded.model, batch)                        # LossSum(loss_sum, n_tokens, aux_loss)
part.objective(global_tokens).backward()
"""
