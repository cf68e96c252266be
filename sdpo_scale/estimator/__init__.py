"""The estimators of the step's gradient: what is executed, with which probability and weight."""
