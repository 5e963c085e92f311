"""The exercises of each notebook: task, reference solution, known mistakes, and how an answer is observed."""
