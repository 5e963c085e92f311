"""Patients of the clinic: one healthy training, illnesses that change one of its lines, and what can be measured."""
