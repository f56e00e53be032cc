"""Build the Trainer of a request, or receive the user's, and run it on tensors without bytes.

Everything here raises PlanError for a wrong input, and NotPredicted for a sound one whose memory
cannot be predicted.
"""
