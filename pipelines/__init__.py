"""The programs: parse -> validated config -> build -> run. No data logic."""
