"""A run on one rank: its parts, a step's rollout, what is saved of it, and how the next start restores it.

``session.py`` opens what every command that generates text needs, ``job.py`` the rest of a training run;
``rollout_loop.py`` is a step's rollout and what a rank does while it waits.

=======================  ===========================================  ==============================================
what                     when                                         restored by
=======================  ===========================================  ==============================================
finished responses       every five minutes of a rollout, and at its  ``kept_responses.open_keeper_all_ranks``: they
(``kept_responses.py``)  end                                          are not generated again
a step's log and its     after the step's update                      ``replay.replay``: the step's policy update is
line                     (``train.commit_step``)                      repeated, nothing is generated
drafter alone            after every step, if the last is written     ``replay.replay``, on the way to its step
(``saving.py``)          (``begin_drafter_save_if_due``)
checkpoint: policy,      every ``checkpoint.every_steps`` steps, at   ``saving.resume``, first of all
optimizer, reference,    the end and before a stop (``save_at_end``)
drafter, strategies
mark of a finished run   at the end (``record_finished``)             ``plans.finished_message``, before ranks start
=======================  ===========================================  ==============================================

``saving.resume`` is the whole restart: newest checkpoint, replay, weights to the engine, calibration.
"""
