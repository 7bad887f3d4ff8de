"""The planner: contracts a program to jobs, schedules them, searches, and explains what stays exposed."""
