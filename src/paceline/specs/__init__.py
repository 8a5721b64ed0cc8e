"""Specs of strategies, optimizers and schedules: plain data with one text form, without torch."""
