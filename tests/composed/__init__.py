"""Scenarios of composition: what a user does to a model beside offloading it, compared bit for bit with the resident model.

Used by the tests on the simulated accelerator and by `python -m tests.gpu.composition`.
"""
