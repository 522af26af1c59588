"""DeepSpeed's universal format: conversion and loading."""
