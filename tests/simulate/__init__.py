"""Scale on paper and by simulation: plans ten million files with the real planner and works out what they take."""
