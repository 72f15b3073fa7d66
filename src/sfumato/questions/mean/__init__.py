"""What is the mean of the devices' vectors?"""
