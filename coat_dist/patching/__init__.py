"""The patcher of built models, which transformers and Megatron models share.

A model is patched in two steps. First a :class:`~.plan.Plan` is made: for each block of the model
the modules whose class will change, or the reason why the block stays in BF16. Nothing is changed
meanwhile, and a plan that the settings rule out is refused. Then the plan is applied, all of it or
nothing, and the record of the changes undoes them.

A package that patches models (``coat_dist/hf``, ``megatron_patches``) brings two things: the
*recognizers*, a short ordered list of functions that fill in one entry of the plan each, and the
*mixins*, classes whose ``forward`` runs the flow.

``plan.py`` has the plan, ``changes.py`` its application and its undoing, ``classes.py`` the patched
classes, ``reasons.py`` why modules stay as they are (weights, hooks and forwards of a program),
``report.py`` what a user reads, ``settings.py`` which options each kind of model can honour.
"""
