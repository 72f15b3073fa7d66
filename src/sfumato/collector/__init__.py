"""The collector: a service that receives reports from devices and gives releases to analysts."""
