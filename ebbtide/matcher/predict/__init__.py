"""Prediction of how long machines keep their cores: completion probability (P_c), its curves and its calibration."""
