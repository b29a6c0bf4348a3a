"""What formats are: values that programs, packers and the registry ask for every number that depends on one."""
