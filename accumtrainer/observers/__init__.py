"""Who watches training: callbacks, their dispatcher, loggers, the bar."""
