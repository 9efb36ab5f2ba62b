"""Saves that all ranks make at one step: asked for from outside, or by a signal to any rank."""
